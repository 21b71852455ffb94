"""docs/operations.md lists every setting and every metric, with the words of the code: neither more nor less."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from app.config import Settings, load_settings, variable
from app.ingest.registry import parse_pods
from app.main import create_app
from app.pods import SourceState
from app.replication import entries
from app.snapshots import frames

PAGE = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_settings() -> None:
    expected = [
        [f"`{variable(name)}`", shown(field.default), field.description]
        for name, field in Settings.model_fields.items()
    ]
    assert table("Settings") == expected


def test_metrics() -> None:
    app = create_app(load_settings())
    exposition = app.state.wiring.metrics.exposition().decode()
    families = [f for f in text_string_to_metric_families(exposition) if f.name.startswith("kvindexer_")]
    listed = {row[0].strip("`"): row[1:] for row in table("Metrics")}
    told = {f.name + ("_total" if f.type == "counter" else ""): f for f in families}
    assert set(listed) == set(told)
    for name, (kind, labels, meaning) in listed.items():
        assert kind == told[name].type, name
        assert meaning, name
        allowed = set(re.findall(r"`(\w+)`", labels)) | {"le"}
        assert all(set(sample.labels) <= allowed for sample in told[name].samples), name


def test_notation_of_pods_is_one_that_is_taken() -> None:
    section = PAGE.split("## Pods\n", 1)[1].split("\n## ", 1)[0]
    [lines] = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert [spec.name for spec in parse_pods(lines, origin="the page")] == ["pod-a", "pod-b"]


def test_versions() -> None:
    listed = {row[0]: row[1] for row in table("Upgrade")}
    assert listed["snapshots (`app/snapshots/frames.py`)"] == str(frames.VERSION)
    assert listed["the log in Redis (`app/replication/entries.py`)"] == str(entries.VERSION)


def test_states_are_those_of_a_source() -> None:
    assert [row[0].strip("`") for row in table("States")] == [state.value for state in SourceState]
