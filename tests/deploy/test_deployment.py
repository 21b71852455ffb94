"""The container files without containers: the same commands, environment and health checks as plain processes.

What needs an engine, building the images and starting the containers, is not proven here. Names that only exist
on the network of the containers and fixed ports are replaced; everything else is taken from the files as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60.0
REPLICAS = ("indexer-1", "indexer-2")
OURS = (*REPLICAS, "pod", "router")
PODS = 1  # of the replicas: they are told apart by the names of their machines, and here is one


def load(path: str) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text())


COMPOSE = load("docker-compose.yml")["services"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/kvindexer.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


# -- as plain processes


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Stack:
    """The services of ours, started as compose starts them: one that another depends on is healthy before."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.addresses: dict[str, str] = {}  # on the network of the containers -> here
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pods: list[dict[str, str]] = []

    def start(self) -> None:
        if "redis" in COMPOSE[REPLICAS[0]].get("depends_on", {}):
            self.start_redis()
        for name in REPLICAS:
            port = {"8080": free_port()}
            self.addresses[f"{name}:8080"] = f"127.0.0.1:{port['8080']}"
            self._start(name, name, port)
        for name in REPLICAS:
            self.wait_healthy(name, {"8080": self.url(name).rpartition(":")[2]})
        for number in range(PODS):
            ports = {name: free_port() for name in ("9000", "5557", "6557")}
            self.pods.append(ports)
            self._start(f"pod-{number}", "pod", ports)
            self.wait_healthy("pod", ports)
        self._start("router", "router", {})

    def start_redis(self) -> None:
        port, folder = {"6379": free_port()}, self.place / "data"
        folder.mkdir()
        self.addresses["redis:6379"] = f"127.0.0.1:{port['6379']}"
        command = [str(folder) if word == "/data" else word for word in COMPOSE["redis"]["command"]]
        self._run("redis", self.adapted(command, port), {})
        self.wait_healthy("redis", port)

    def stop(self) -> dict[str, int]:
        for process in reversed(self.processes.values()):
            process.send_signal(getattr(signal, _instruction("STOPSIGNAL")))
        return {name: process.wait(DEADLINE_S) for name, process in self.processes.items()}

    def url(self, replica: str) -> str:
        return f"http://{self.addresses[f'{replica}:8080']}"

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    def wait_healthy(self, service: str, ports: dict[str, str]) -> None:
        command = self.adapted(_health_command(service), ports)
        if service in OURS:
            assert command[0] == "python", "the image has no other tool"
            command[0] = sys.executable
        deadline = time.monotonic() + DEADLINE_S
        while subprocess.run(command, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"{service} never became healthy"
            time.sleep(0.05)

    def adapted(self, words: list[str], ports: dict[str, str]) -> list[str]:
        adapted = []
        for word in words:
            changed = word
            for address, here in self.addresses.items():
                changed = changed.replace(address, here)
            for port, other in ports.items() if changed == word else ():
                changed = re.sub(rf"\b{port}\b", other, changed)
            adapted.append(changed)
        return adapted

    def _start(self, name: str, service: str, ports: dict[str, str]) -> None:
        said = COMPOSE[service]
        # The entry point is `kvindexer`, which is `python -m app` of this environment here.
        command = [sys.executable, "-m", "app", *self.adapted(said["command"], ports)]
        values = {**_image_environment(), **said.get("environment", {})}
        del values["PATH"]
        environment = dict(zip(values, self.adapted(list(values.values()), ports), strict=True))
        self._run(name, command, {**environment, "PYTHONPATH": str(ROOT)})

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.place / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.place,
                env=environment or None,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _instruction(name: str) -> str:
    found = re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)
    return str(found[-1]).strip()


def _image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in _instruction("ENV").split())


def _health_command(service: str) -> list[str]:
    healthcheck = COMPOSE[service].get("healthcheck")
    if healthcheck is not None:
        assert healthcheck["test"][0] == "CMD"
        return list(healthcheck["test"][1:])
    command: list[str] = json.loads(re.search(r"HEALTHCHECK.*CMD (\[.*\])", DOCKERFILE).group(1))  # type: ignore[union-attr]
    return command


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with new_stack() as started:
        started.start()
        yield started


@contextlib.contextmanager
def new_stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory() as place:
        made = Stack(Path(place))
        try:
            yield made
        finally:
            for process in made.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def exposed(stack: Stack) -> set[str]:
    """Names of all series of the indexers and a pod."""
    names: set[str] = set()
    for url in (*map(stack.url, REPLICAS), f"http://127.0.0.1:{stack.pods[0]['9000']}"):
        text = httpx.get(f"{url}/metrics").text
        names |= set(re.findall(r"^([a-z_A-Z:][a-z_A-Z0-9:]*)", text, re.MULTILINE))
        names |= {f"# {name}" for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    return names


def queried() -> set[str]:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 20
    pattern = r"\b(?:kvindexer_|vllm:|process_)[a-z0-9_:]+"
    found = [re.findall(pattern, expression) for expression in expressions]
    assert all(found), "an expression without a metric"
    return {name for names in found for name in names}


def choices(url: str) -> float:
    try:
        text = httpx.get(f"{url}/metrics").text
    except httpx.TransportError:
        return 0  # it is not up yet
    found = re.search(r"^kvindexer_route_choices_prefix_and_load_total (\S+)", text, re.MULTILINE)
    return float(found.group(1)) if found else 0


def wait_for_choices(stack: Stack, more: dict[str, float]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for name, count in more.items():
        while choices(stack.url(name)) < count:
            assert time.monotonic() < deadline, stack.log("router")
            time.sleep(0.05)


def test_the_commands_of_compose_run_serve_and_end(stack: Stack) -> None:
    wait_for_choices(stack, dict.fromkeys(REPLICAS, 5))
    for name in REPLICAS:
        pods = httpx.get(f"{stack.url(name)}/v1/pods").json()["pods"]
        assert len(pods) == PODS
        assert {rank["state"] for pod in pods for rank in pod["ranks"]} == {"live"}
        assert httpx.get(stack.url(name)).headers["content-type"].startswith("text/html")

    missing = {name for name in queried() if name not in exposed(stack) and f"# {name}" not in exposed(stack)}
    # Series with labels exist from the first event of their kind on; their names are announced before.
    assert missing == set()

    # One replica goes, and the router does not stop; it comes back, and is told of its pods again.
    first, second = REPLICAS
    stack.processes[first].send_signal(signal.SIGKILL)
    stack.processes[first].wait(DEADLINE_S)
    wait_for_choices(stack, {second: choices(stack.url(second)) + 10})
    stack._start(first, first, {"8080": stack.url(first).rpartition(":")[2]})
    wait_for_choices(stack, {first: 5})

    assert stack.stop() == dict.fromkeys(stack.processes, 0), "".join(map(stack.log, stack.processes))
    for name in stack.processes:
        assert "Traceback" not in stack.log(name)


def test_the_redis_of_compose_runs_and_answers() -> None:
    if shutil.which("redis-server") is None:
        assert "CI" not in os.environ, "CI has redis-server"
        pytest.skip("there is no redis-server")
    with new_stack() as stack:
        stack.start_redis()
        assert stack.stop() == {"redis": 0}


def test_redis_is_started_where_it_is_used() -> None:
    used = {"KVINDEXER_REDIS_URL" in COMPOSE[name]["environment"] for name in REPLICAS}
    waited_for = {"redis" in COMPOSE[name].get("depends_on", {}) for name in REPLICAS}
    assert used == waited_for == {"profiles" not in COMPOSE["redis"]}


# -- what the files promise


def test_every_service_is_hardened_pinned_and_checked() -> None:
    for name, service in COMPOSE.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), name
        assert "healthcheck" in service or name in REPLICAS, name
        for dependency, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, dependency)
    assert set(OURS) <= set(COMPOSE)
    assert COMPOSE["pod"]["deploy"]["replicas"] > 1


def test_the_image_is_slim_pinned_and_not_root() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases == ["${BASE}"] * 2
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    user = _instruction("USER").split(":")
    assert all(int(part) > 0 for part in user)
    assert "g++" in DOCKERFILE
    assert "g++" not in DOCKERFILE.rpartition("\nFROM")[2]


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source in kept, source


def test_every_dependency_is_pinned() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()[1:])
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    for name in re.findall(r'"([a-z0-9-]+)>=', listed.group(1)):
        assert name in pinned, name


def test_prometheus_asks_where_the_services_listen() -> None:
    jobs = {job["job_name"]: job for job in load("deploy/prometheus.yml")["scrape_configs"]}
    assert jobs["kvindexer"]["static_configs"] == [{"targets": [f"{name}:8080" for name in REPLICAS]}]
    [pods] = jobs["pods"]["dns_sd_configs"]
    assert pods["names"] == ["pod"]
    assert f"--port={pods['port']}" in COMPOSE["pod"]["command"]
    assert "./deploy/prometheus.yml:/etc/prometheus/prometheus.yml:ro" in COMPOSE["prometheus"]["volumes"]


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    [source] = load("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    [provider] = load("deploy/grafana/provisioning/dashboards/kvindexer.yml")["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in COMPOSE["grafana"]["volumes"])
    home = Path(COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "deploy/grafana/dashboards" / home.name).is_file()
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (column, line)
        for panel in panels
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
