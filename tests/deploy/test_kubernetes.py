"""deploy/k8s without a cluster: against the published schemas, against each other, and against the program.

`kubectl kustomize` builds it as a cluster would get it; the command and settings of the Deployment are then run as a
plain process beside an API server and an engine of the tests. What needs a cluster (scheduling, the network policy at
work, a real rollout) is not proven here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import redis.asyncio
from ruamel.yaml import YAML

from app.config import PREFIX, Settings, load_settings, variable
from app.discovery.engine import read_answers
from app.discovery.sightings import parse_said, sight
from app.errors import InvalidSettings
from app.main import create_app
from app.simulator.fleet import RunningPod
from app.simulator.pod import PodSettings
from tests.deploy.test_deployment import DEADLINE_S, ROOT, free_port
from tests.discovery.kubernetes_api import NAMESPACE, TOKEN, KubernetesApi
from tests.discovery.waiting import until
from tests.serving.test_serving import serving

FOLDER = ROOT / "deploy" / "k8s"
FOLDERS = (FOLDER, FOLDER / "monitoring", FOLDER / "redis", FOLDER / "vllm")
OLDEST = "1.29"  # that docs/kubernetes.md promises

Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    return list(YAML(typ="safe").load_all(path.read_text()))


def kustomization(folder: Path) -> Manifest:
    [found] = read(folder / "kustomization.yaml")
    return found


@functools.cache
def built(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` sends."""
    command = shutil.which("kubectl")
    if command is None:
        assert "CI" not in os.environ, "kubectl is missing"
        pytest.skip("kubectl builds it (Debian's kubernetes-client)")
    text = subprocess.run([command, "kustomize", folder], capture_output=True, check=True, text=True).stdout
    return list(YAML(typ="safe").load_all(text))


WRITTEN = [
    (path, manifest)
    for folder in FOLDERS
    for name in kustomization(folder)["resources"]
    for path in [folder / name]
    for manifest in read(path)
]


def one(kind: str, name: str = "kvindexer") -> Manifest:
    [found] = [each for _, each in WRITTEN if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


POD = one("Deployment")["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
ENGINE_POD = one("Deployment", "vllm")["spec"]["template"]["spec"]
[ENGINE] = ENGINE_POD["containers"]
[REDIS] = one("StatefulSet", "kvindexer-redis")["spec"]["template"]["spec"]["containers"]
SETTINGS = dict(
    literal.split("=", 1) for literal in kustomization(FOLDER)["configMapGenerator"][0]["literals"]
)


def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return load_settings()


# -- the published schemas


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_is_applied_fits_the_schemas(folder: Path, version: str) -> None:
    manifests = [each for each in built(folder) if each["kind"] != "ServiceMonitor"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert manifests or folder.name == "monitoring"


def test_a_misspelt_field_would_be_noticed() -> None:
    wrong = json.loads(json.dumps(one("Deployment")).replace("enableServiceLinks", "enableServiceLink"))
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_the_service_monitor_fits_the_operators_schema() -> None:
    """Those models let unknown fields pass, so what comes back must be what went in."""
    model = importlib.import_module("cloudcoil.models.prometheus_operator.v1").ServiceMonitor
    [manifest] = built(FOLDER / "monitoring")
    again = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert again == manifest


def test_every_file_is_used_and_every_object_is_in_the_namespace() -> None:
    listed = {path for path, _ in WRITTEN} | {folder / "kustomization.yaml" for folder in FOLDERS}
    assert set(FOLDER.rglob("*.yaml")) == listed
    for folder in FOLDERS:
        namespace = kustomization(folder)["namespace"]
        assert {each["metadata"]["namespace"] for each in built(folder)} == {namespace}
    [subject] = next(each for each in built(FOLDER) if each["kind"] == "RoleBinding")["subjects"]
    assert subject["namespace"] == kustomization(FOLDER)["namespace"]


def test_the_deployment_is_rolled_when_a_setting_changes() -> None:
    [settings_map] = [each for each in built(FOLDER) if each["kind"] == "ConfigMap"]
    assert settings_map["data"] == SETTINGS
    assert re.fullmatch(r"kvindexer-settings-\w{10}", settings_map["metadata"]["name"])
    [deployment] = [each for each in built(FOLDER) if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": settings_map["metadata"]["name"]}}]
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+", container["image"])


# -- against the program


def test_settings_are_known_and_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(name.startswith(PREFIX) for name in SETTINGS)
    known = settings(monkeypatch)
    assert known.discovery_kubernetes is not None
    create_app(known)
    monkeypatch.setenv("KVINDEXER_REDIS_URL", "redis://:secret@kvindexer-redis:6379/0")
    create_app(settings(monkeypatch))  # nothing of it excludes Redis
    fields = {variable(field) for field in Settings.model_fields}
    assert {entry["name"] for entry in CONTAINER["env"] if entry["name"].startswith(PREFIX)} <= fields


def test_a_service_of_our_name_would_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert POD["enableServiceLinks"] is False
    assert one("Service")["metadata"]["name"] == "kvindexer"
    monkeypatch.setenv("KVINDEXER_PORT", "tcp://10.96.0.7:8080")
    with pytest.raises(InvalidSettings, match=r"KVINDEXER_PORT='tcp://10\.96\.0\.7:8080'"):
        load_settings()


def test_probes_ask_paths_that_there_are() -> None:
    paths = create_app(load_settings()).openapi()["paths"]
    for probe, path in (
        ("startupProbe", "/healthz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ):
        assert CONTAINER[probe]["httpGet"] == {"path": path, "port": "http"}
        assert "get" in paths[path]
    [endpoint] = one("ServiceMonitor")["spec"]["endpoints"]
    assert "get" in paths[endpoint["path"]]


def test_ports_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings(monkeypatch)
    [port] = CONTAINER["ports"]
    assert (port["name"], port["containerPort"]) == ("http", known.port)
    for name in ("kvindexer", "kvindexer-replicas"):
        [served] = one("Service", name)["spec"]["ports"]
        assert (served["name"], served["port"], served["targetPort"]) == ("http", known.port, "http")
    [endpoint] = one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == "http"
    [rule] = one("NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": known.port, "protocol": "TCP"}]


def test_selectors_choose_what_they_are_for() -> None:
    for name in ("kvindexer", "vllm"):
        deployment = one("Deployment", name)["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        chosen = [
            deployment["selector"]["matchLabels"],
            one("Service", name)["spec"]["selector"],
            one("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
        ]
        if name == "kvindexer":
            chosen += [
                one("Service", "kvindexer-replicas")["spec"]["selector"],
                one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
                *(each["labelSelector"]["matchLabels"] for each in POD["topologySpreadConstraints"]),
            ]
        for selector in chosen:
            assert selector
            assert selector.items() <= labels.items()
    scaled = one("HorizontalPodAutoscaler")["spec"]
    assert scaled["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "kvindexer"}
    assert "replicas" not in one("Deployment")["spec"], "an apply would undo what the autoscaler did"
    assert scaled["minReplicas"] > one("PodDisruptionBudget")["spec"]["maxUnavailable"]
    monitored = one("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [one("Service", name)["metadata"]["labels"] for name in ("kvindexer", "kvindexer-replicas")]
    assert [monitored.items() <= labels.items() for labels in services] == [False, True], "scraped once"


def test_rights_are_those_that_discovery_uses_and_no_more() -> None:
    role, binding = one("Role"), one("RoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": POD["serviceAccountName"]}]
    assert one("ServiceAccount", POD["serviceAccountName"])["automountServiceAccountToken"] is False
    assert POD["automountServiceAccountToken"] is True
    assert ENGINE_POD["automountServiceAccountToken"] is False


def test_secrets_come_by_reference() -> None:
    assert not [path for path, each in WRITTEN if each["kind"] == "Secret"]
    assert SETTINGS.get("KVINDEXER_REDIS_URL") is None
    for container in (CONTAINER, ENGINE, REDIS):
        for entry in container["env"]:
            secretive = re.search(r"TOKEN|KEY|SECRET|PASSWORD|REDIS_URL", entry["name"])
            assert ("secretKeyRef" in entry.get("valueFrom", {})) == bool(secretive), entry["name"]
    assert not [name for name in SETTINGS if re.search(r"TOKEN$|KEYS?$|SECRET|PASSWORD|REDIS_URL", name)]


def test_nothing_runs_as_root_or_writes_beside_its_volumes() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    [user] = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    said = POD["securityContext"]
    assert (str(said["runAsUser"]), str(said["runAsGroup"])) == user
    assert said["runAsNonRoot"] is True
    assert said["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert all("sizeLimit" in volume["emptyDir"] for volume in volumes.values())
    [home] = re.findall(r"HF_HOME=(\S+)", dockerfile)
    assert Path(home).parent in mounts
    for resource in ("cpu", "memory"):
        assert resource in CONTAINER["resources"]["requests"]


def test_an_orderly_end_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings(monkeypatch)
    command, wait_s = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert known.snapshot_path is None, "its grace would have to be added"
    assert POD["terminationGracePeriodSeconds"] > float(wait_s) + 2 * known.shutdown_grace_s


# -- the Redis beside it


def test_redis_is_reached_by_the_replicas_alone() -> None:
    pod = one("StatefulSet", "kvindexer-redis")["spec"]["template"]
    [port] = REDIS["ports"]
    [served] = one("Service", "kvindexer-redis")["spec"]["ports"]
    labels = pod["metadata"]["labels"]
    assert one("StatefulSet", "kvindexer-redis")["spec"]["serviceName"] == "kvindexer-redis"
    assert one("Service", "kvindexer-redis")["spec"]["selector"] == labels
    assert (port["name"], served["port"], served["targetPort"]) == ("redis", port["containerPort"], "redis")
    policy = one("NetworkPolicy", "kvindexer-redis")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    replicas = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    [into] = policy["ingress"]
    assert into["from"] == [{"podSelector": {"matchLabels": replicas}}]
    [out] = [rule for rule in one("NetworkPolicy")["spec"]["egress"] if _to(rule) == labels]
    assert [rule["ports"] for rule in (into, out)] == [[{"port": served["port"], "protocol": "TCP"}]] * 2
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert REDIS["securityContext"] == CONTAINER["securityContext"]


def test_the_command_of_redis_keeps_the_log_and_asks_for_the_password(tmp_path: Path) -> None:
    """As it stands, but for its port and its folder."""
    for program in ("redis-server", "redis-cli"):
        if shutil.which(program) is None:
            assert "CI" not in os.environ, f"{program} is missing"
            pytest.skip("redis-server is not installed")
    port = free_port()
    [script] = REDIS["args"]
    here = script.replace("--dir /data", f"--dir {tmp_path} --port {port} --bind 127.0.0.1")
    password = {"REDIS_PASSWORD": "a b#c"}
    process = subprocess.Popen(
        [*REDIS["command"], here], env={**os.environ, **password}, stdout=subprocess.DEVNULL
    )

    async def run() -> None:
        client = redis.asyncio.Redis(port=int(port), password="a b#c")

        async def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return bool(await client.ping())
            return False

        await until(answers, "it answers to the password")
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("appendonly"))["appendonly"] == "yes"
        await client.aclose()
        stranger = redis.asyncio.Redis(port=int(port))
        with pytest.raises(redis.AuthenticationError):
            await stranger.ping()
        await stranger.aclose()

    try:
        asyncio.run(run())
        ready = [part.replace("redis-cli", f"redis-cli -p {port}") for part in _probe(REDIS)]
        assert subprocess.run(ready, env={**os.environ, **password}, check=False).returncode == 0
        assert subprocess.run(ready, env={**os.environ, "REDIS_PASSWORD": "x"}, check=False).returncode != 0
    finally:
        process.terminate()
        code = process.wait(DEADLINE_S)
    assert code == 0, "the signal is Redis' own"


def _probe(container: Manifest) -> list[str]:
    command: list[str] = container["readinessProbe"]["exec"]["command"]
    return command


# -- the engine beside it


def _to(rule: Manifest) -> Any:
    """The labels of the pods that a rule of egress is for."""
    return rule["to"][0]["podSelector"]["matchLabels"] if "to" in rule else None


def engine_arguments() -> dict[str, str]:
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in ENGINE["args"])


def test_the_indexer_finds_the_example_and_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings(monkeypatch)
    labels = one("Deployment", "vllm")["spec"]["template"]["metadata"]["labels"]
    key, _, value = (known.discovery_kubernetes or "").partition("=")
    assert labels[key] == value

    told = json.loads(engine_arguments()["kv-events-config"])
    said = parse_said(known.discovery_kubernetes_engines, place="")
    assert str(said.engine_port) == engine_arguments()["port"]
    page = b'vllm:num_requests_running{model_name="m"} 0\n'
    spec = read_answers(sight("vllm-0", "", "10.1.2.3", said), json.dumps({"0": told}).encode(), page).spec
    assert (spec.zmq_endpoint, spec.replay_endpoint) == ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:6557")

    ports = {int(spec.zmq_endpoint.rpartition(":")[2]), int(spec.replay_endpoint.rpartition(":")[2])}  # type: ignore[union-attr]
    ports.add(said.engine_port or 0)
    assert {port["containerPort"] for port in ENGINE["ports"]} == ports
    [out] = [rule for rule in one("NetworkPolicy")["spec"]["egress"] if _to(rule) == labels]
    into = [port for rule in one("NetworkPolicy", "vllm")["spec"]["ingress"] for port in rule["ports"]]
    for rules in (out["ports"], into):
        assert all(
            any(rule["port"] <= port <= rule.get("endPort", rule["port"]) for rule in rules) for port in ports
        )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ENGINE[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_the_deployments_process_follows_an_engine(tmp_path: Path) -> None:
    """Its command and its settings; only addresses, ports and folders are this machine's."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(NAMESPACE)
    labels = one("Deployment", "vllm")["spec"]["template"]["metadata"]["labels"]

    async def run(api: KubernetesApi) -> None:
        engine = RunningPod(PodSettings(model="m"), 0)
        await engine.start()
        try:
            api.put("vllm-0", ip="127.0.0.1", labels=labels)
            here = {
                "KVINDEXER_HOST": "127.0.0.1",
                "KVINDEXER_PORT": "0",
                "KVINDEXER_DISCOVERY_KUBERNETES_ENGINES": f"port={engine.url.rpartition(':')[2]}",
                "KVINDEXER_DISCOVERY_KUBERNETES_API_URL": api.url,
                "KVINDEXER_DISCOVERY_KUBERNETES_ACCOUNT": str(tmp_path),
            }
            process, port = await asyncio.to_thread(
                life.enter_context, serving(*CONTAINER["args"], **SETTINGS | here)
            )
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as http:

                async def is_ready() -> bool:
                    return (await http.get(CONTAINER["readinessProbe"]["httpGet"]["path"])).status_code == 200

                await until(is_ready, "it is ready")
                [pod] = (await http.get("/v1/pods")).json()["pods"]
            assert (pod["pod"], pod["model"], pod["ranks"][0]["state"]) == ("vllm-0", "m", "live")
            api.end_watches()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        finally:
            await engine.stop()

    with KubernetesApi() as api, contextlib.ExitStack() as life:
        asyncio.run(run(api))
