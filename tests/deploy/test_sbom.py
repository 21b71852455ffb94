"""`make sbom`: the bill of materials names what the image is built with, and needs no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import app

ROOT = Path(__file__).parent.parent.parent

# The tool as it is, in a process in which nothing can reach a network: no name is resolved, no socket connects.
OFFLINE = """
import runpy, sys
def refuse(event, _arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise PermissionError("this was to be done without a network")
sys.addaudithook(refuse)
sys.argv[0] = "cyclonedx-py"
runpy.run_module("cyclonedx_py", run_name="__main__", alter_sys=True)
"""


def arguments() -> list[str]:
    """Those of the target, as it has them."""
    found = re.search(
        r"cyclonedx-py (requirements .*?)--output-file", (ROOT / "Makefile").read_text(), re.DOTALL
    )
    assert found, "make sbom does not call cyclonedx-py"
    return found[1].replace("\\\n", " ").split()


def test_bill_of_materials(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *arguments(), "--output-file", str(made)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bill = json.loads(made.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        "kvindexer",
        app.__version__,
    )
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "deploy" / "constraints.txt").read_text(), re.MULTILINE)
    assert pins
    components = {(component["name"], component["version"]) for component in bill["components"]}
    assert components == set(pins)
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])


def test_hook_refuses_the_network() -> None:
    """Or the test above would show nothing."""
    tried = OFFLINE.replace(
        'runpy.run_module("cyclonedx_py", run_name="__main__", alter_sys=True)',
        'import socket; socket.create_connection(("127.0.0.1", 9))',
    )
    done = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True, check=False)
    assert "without a network" in done.stderr
