"""The container files without containers: the same commands, environment and health checks as plain processes.

What needs an engine, building the images and starting the containers, is not proven here. Names that only exist
on the network of the containers and fixed ports are replaced; everything else is taken from the files as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
OURS = ("indexer", "pod", "router")
PODS = 1  # of the replicas: they are told apart by the names of their machines, and here is one


def load(path: str) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text())


COMPOSE = load("docker-compose.yml")["services"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/kvindexer.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


# -- as plain processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Stack:
    """The services of ours, started as compose starts them: one that another depends on is healthy before."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.replaced = {"8080": str(free_port())}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pods: list[dict[str, str]] = []

    def start(self) -> None:
        self._start("indexer", "indexer", self.replaced)
        self.wait_healthy("indexer", self.replaced)
        for number in range(PODS):
            ports = {name: str(free_port()) for name in ("9000", "5557", "6557")}
            self.pods.append(ports)
            self._start(f"pod-{number}", "pod", self.replaced | ports)
            self.wait_healthy("pod", self.replaced | ports)
        self._start("router", "router", self.replaced)

    def stop(self) -> dict[str, int]:
        for process in reversed(self.processes.values()):
            process.send_signal(getattr(signal, _instruction("STOPSIGNAL")))
        return {name: process.wait(DEADLINE_S) for name, process in self.processes.items()}

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    def wait_healthy(self, service: str, replaced: dict[str, str]) -> None:
        command = self.adapted(_health_command(service), replaced)
        assert command[0] == "python", "the image has no other tool"
        deadline = time.monotonic() + DEADLINE_S
        while subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"{service} never became healthy"
            time.sleep(0.05)

    @staticmethod
    def adapted(words: list[str], replaced: dict[str, str]) -> list[str]:
        adapted = []
        for word in words:
            changed = word.replace("indexer:8080", "127.0.0.1:8080")
            for port, other in replaced.items():
                changed = re.sub(rf"\b{port}\b", other, changed)
            adapted.append(changed)
        return adapted

    def _start(self, name: str, service: str, replaced: dict[str, str]) -> None:
        said = COMPOSE[service]
        # The entry point is `kvindexer`, which is `python -m app` of this environment here.
        command = [sys.executable, "-m", "app", *self.adapted(said["command"], replaced)]
        values = {**_image_environment(), **said.get("environment", {})}
        del values["PATH"]
        environment = dict(zip(values, self.adapted(list(values.values()), replaced), strict=True))
        environment["PYTHONPATH"] = str(ROOT)
        with (self.place / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.place, env=environment, stdout=log, stderr=log, start_new_session=True
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
    with tempfile.TemporaryDirectory() as place:
        started = Stack(Path(place))
        try:
            started.start()
            yield started
        finally:
            for process in started.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def exposed(stack: Stack) -> set[str]:
    """Names of all series of the indexer and a pod."""
    names: set[str] = set()
    for port in (stack.replaced["8080"], stack.pods[0]["9000"]):
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
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


def test_the_commands_of_compose_run_serve_and_end(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.replaced['8080']}"
    deadline = time.monotonic() + DEADLINE_S
    routed: float = 0
    while routed < 5:
        assert time.monotonic() < deadline, stack.log("router")
        text = httpx.get(f"{url}/metrics").text
        found = re.search(r"^kvindexer_route_choices_prefix_and_load_total (\S+)", text, re.MULTILINE)
        routed = float(found.group(1)) if found else 0
        time.sleep(0.05)
    pods = httpx.get(f"{url}/v1/pods").json()["pods"]
    assert len(pods) == PODS
    assert {rank["state"] for pod in pods for rank in pod["ranks"]} == {"live"}
    assert httpx.get(url).headers["content-type"].startswith("text/html")

    missing = {name for name in queried() if name not in exposed(stack) and f"# {name}" not in exposed(stack)}
    # Series with labels exist from the first event of their kind on; their names are announced before.
    assert missing == set()

    assert stack.stop() == dict.fromkeys(stack.processes, 0), stack.log("router")
    assert sorted(path.suffix for path in stack.place.iterdir()) == [".log"] * len(stack.processes)
    for name in stack.processes:
        assert "Traceback" not in stack.log(name)


# -- what the files promise


def test_every_service_is_hardened_pinned_and_checked() -> None:
    for name, service in COMPOSE.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), name
        assert "healthcheck" in service or name == "indexer", name
        for dependency, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, dependency)
    assert set(OURS) <= set(COMPOSE)
    assert COMPOSE["pod"]["deploy"]["replicas"] > 1


def test_the_image_is_slim_pinned_and_not_root() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
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
    assert jobs["kvindexer"]["static_configs"] == [{"targets": ["indexer:8080"]}]
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
