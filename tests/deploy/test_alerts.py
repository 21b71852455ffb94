"""The alert rules: proven by promtool, explained in docs/operations.md, and fired by a real Prometheus.

Debian's package `prometheus` has both programs. Prometheus scrapes a real `kvindexer serve`; of the rules only `for`
is left out there, and no expression is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from app.config import load_settings
from app.main import create_app
from tests.api.conftest import stored
from tests.deploy.test_deployment import free_port
from tests.serving.test_serving import serving

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy/alerts.yml"
TESTS = ROOT / "deploy/alerts_test.yml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/kvindexer.json"
DEADLINE_S = 60.0

yaml = YAML(typ="safe")
GROUPS: list[dict[str, Any]] = yaml.load(RULES.read_text())["groups"]
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return found


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- the files by themselves


def test_rules_and_configuration_are_valid() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))
    promtool("check", "config", "--syntax-only", str(ROOT / "deploy/prometheus.yml"))
    assert yaml.load((ROOT / "deploy/prometheus.yml").read_text())["rule_files"] == [RULES.name]
    prometheus = yaml.load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]
    assert "./deploy/alerts.yml:/etc/prometheus/alerts.yml:ro" in prometheus["volumes"]


def test_every_rule_fires_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", str(TESTS))
    cases = [case for test in yaml.load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for name in NAMES:
        outcomes = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name}
        assert outcomes == {True, False}, (
            f"{name} has no case in which it fires, or none in which it does not"
        )


def test_every_rule_says_what_is_wrong_and_where_to_read_on() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    section = page.split("\n## Alerts and what to do\n", 1)[1].split("\n## ", 1)[0]
    paragraphs = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))
    assert list(paragraphs) == NAMES, "in the order of the rules"
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{anchor}"
        for part in ("*Means*: ", "*Look at*: ", "*Do*: "):
            assert paragraphs[rule["alert"]].count(f"- {part}") == 1, (rule["alert"], part)


def exposed(exposition: str) -> dict[str, set[str]]:
    """Name of every series that there can be -> labels seen on it."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        name = family.name + ("_total" if family.type == "counter" else "")
        parts = (
            [name + end for end in ("_bucket", "_count", "_sum")] if family.type == "histogram" else [name]
        )
        for part in parts:
            found[part] = {"le"} if part.endswith("_bucket") else set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def named(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:kvindexer|process)_[a-z0-9_]+", expression))


def test_every_metric_of_rules_and_panels_is_exposed() -> None:
    app = create_app(load_settings())
    known = exposed(app.state.wiring.metrics.exposition().decode())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    expressions += [rule["expr"] for rule in ALERTS]
    assert set().union(*map(named, expressions)) - set(known) == set()
    for rule in ALERTS:
        text = " ".join(str(value) for value in rule["annotations"].values())
        assert named(rule["expr"]) or "up{" in rule["expr"], rule["alert"]
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= {
            "instance",
            "route",
            "cause",
            "pod",
            "dp_rank",
            "place",
        }


def test_paragraphs_name_metrics_and_settings_that_there_are() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    section = page.split("\n## Alerts and what to do\n", 1)[1].split("\n## Log lines\n", 1)[0]
    known = set(exposed(create_app(load_settings()).state.wiring.metrics.exposition().decode()))
    assert named(section) - known == set()
    assert all(f"| `{name}` |" in page for name in re.findall(r"`(KVINDEXER_[A-Z_]+)`", section))


# -- a real Prometheus


class Prometheus:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str, **params: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.get("query", query=expression)["result"])

    def firing(self) -> dict[str, dict[str, Any]]:
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


def wait_for(happened: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def impatient() -> dict[str, Any]:
    return {
        "groups": [{**group, "rules": [{**rule, "for": "0s"} for rule in group["rules"]]} for group in GROUPS]
    }


@contextlib.contextmanager
def prometheus(place: Path, target: int) -> Iterator[Prometheus]:
    """Scrapes the indexer at port `target` five times a second, with the rules of deploy/."""
    binary = program("prometheus")
    (place / "alerts.yml").write_text(json.dumps(impatient()))  # JSON is YAML
    configuration = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "kvindexer", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        ],
    }
    (place / "prometheus.yml").write_text(json.dumps(configuration))
    port = free_port()
    command = [
        binary,
        f"--config.file={place / 'prometheus.yml'}",
        f"--storage.tsdb.path={place / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
            started = Prometheus(http)
            wait_for(started.is_ready, lambda: (place / "log").read_text())
            yield started
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_a_real_prometheus_scrapes_evaluates_and_fires(tmp_path: Path) -> None:
    program("prometheus")
    with (
        serving("serve", "--port", "0") as (_, port),
        prometheus(tmp_path, port) as watching,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as indexer,
    ):

        def post(pod: str, seq: int) -> None:
            body = {"pod": pod, "model": "m", "seq": seq, "events": [stored([seq + 1], [1, 2, 3, 4])]}
            assert indexer.post("/v1/events", json=body).status_code == 200

        for pod in ("pod-a", "pod-b"):
            post(pod, 0)
        indexer.post("/v1/match", json={"model": "m", "token_ids": [1, 2, 3, 4]})
        wait_for(
            lambda: len(watching.query("kvindexer_source_gaps_total == 0")) == 2,
            lambda: watching.get("targets"),
        )
        [target] = watching.get("targets")["activeTargets"]
        assert (target["health"], target["lastError"], target["labels"]["job"]) == ("up", "", "kvindexer")
        check_every_expression(watching)
        assert watching.firing() == {}, "nothing is wrong yet"

        for seq in range(5, 50, 10):  # five gaps
            post("pod-b", seq)
        wait_for(
            lambda: {"KvindexerGaps", "KvindexerSourceDegraded"} <= set(watching.firing()),
            lambda: (watching.get("alerts"), indexer.get("/v1/pods").text),
        )
        fired = watching.firing()
        assert set(fired) == {"KvindexerGaps", "KvindexerSourceDegraded"}
        assert {alert["labels"]["pod"] for alert in fired.values()} == {"pod-b"}
        assert "pod-b, rank 0" in fired["KvindexerSourceDegraded"]["annotations"]["summary"]
        # The engine clears its cache: the picture is whole again, and so the alert ends.
        body = {"pod": "pod-b", "model": "m", "seq": 46, "events": [{"type": "AllBlocksCleared"}]}
        assert indexer.post("/v1/events", json=body).status_code == 200
        wait_for(lambda: "KvindexerSourceDegraded" not in watching.firing(), lambda: watching.get("alerts"))


def check_every_expression(watching: Prometheus) -> None:
    """Of the rules by Prometheus itself, of the panels as Grafana would ask them."""
    wait_for(
        lambda: all(
            rule["health"] == "ok" for group in watching.get("rules")["groups"] for rule in group["rules"]
        ),
        lambda: watching.get("rules"),
    )
    rules = [rule for group in watching.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(NAMES)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    # Without pods there are no series of theirs, nothing has failed, and no event was skipped.
    absent = ("vllm:", "[45]..", "kvindexer_events_rejected_total")

    def silent() -> list[str]:
        asked = {expression: expression.replace("$__rate_interval", "1m") for expression in expressions}
        empty = [expression for expression, query in asked.items() if not watching.query(query)]
        return [expression for expression in empty if not any(name in expression for name in absent)]

    wait_for(lambda: silent() == [], silent)


def test_prometheus_sees_that_the_indexer_is_gone(tmp_path: Path) -> None:
    program("prometheus")
    with serving("serve", "--port", "0") as (process, port), prometheus(tmp_path, port) as watching:
        wait_for(lambda: bool(watching.query('up{job="kvindexer"} == 1')), lambda: watching.get("targets"))
        process.terminate()
        process.wait(DEADLINE_S)
        wait_for(lambda: set(watching.firing()) == {"KvindexerDown"}, lambda: watching.get("alerts"))
