"""The package as `pip install .` leaves it, not editable, started where another folder `app` lies: in the clone, say,
whose sources have no native core. What it starts in its turn is the installed one too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

from app import _native
from tests.tokenizers import save_tokenizer

ROOT = Path(__file__).parent.parent
DEADLINE_S = 120.0


class Installed:
    """Run by the interpreter beneath the virtual environment, because an editable install is found before any folder."""

    def __init__(self, folder: Path) -> None:
        site, self._clone = folder / "site", folder / "clone"
        shutil.copytree(ROOT / "app", site / "app", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(str(_native.__file__), site / "app")
        (self._clone / "app").mkdir(parents=True)
        (self._clone / "app" / "__init__.py").write_text("raise SystemExit('not this one')")
        paths = [str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        python = getattr(sys, "_base_executable", sys.executable)
        return subprocess.Popen(
            [python, "-P", "-m", "app", *arguments],
            cwd=self._clone,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", str(ROOT / "tests" / "data" / "captures" / "v0.32.0-dp2"), "--json"),
        ("demo", "--seconds", "1", "--pods", "1", "--policy", "longest_prefix", "--json"),
    ],
)
def test_a_command_starts_its_indexer(installed: Installed, arguments: tuple[str, ...]) -> None:
    process = installed.start(*arguments)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert json.loads(out)


def test_the_indexer_starts_its_tokenizer(installed: Installed, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    process = installed.start("serve", "--port", "0")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        asked = {"model": str(tmp_path), "text": "the cat"}
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
            http.put("/v1/pods/pod-a", json={"model": str(tmp_path)}).raise_for_status()
            answer = http.post("/v1/match", json=asked)
        assert answer.json()["tokens"] > 0, answer.text
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
