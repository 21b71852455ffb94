"""Every page for people: its links lead somewhere, and what it names is there."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.config import Settings, load_settings, variable
from app.main import create_app
from tests.command_page import commands

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = "app|benchmarks|deploy|docs|examples|native|tests"
OTHER_VARIABLES = {"KVINDEXER_URL", "KVINDEXER_API_KEY", "KVINDEXER_SANITIZE"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), target


@each_page
def test_files_and_modules_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(rf"(?<![\w./:<{{-])(?:{FOLDERS})/[\w./*-]*[\w*]", text)
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("./")))]
    assert not missing
    for module in re.findall(r"python -m ((?:app|benchmarks|examples|tests)[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


@each_page
def test_variables_and_targets_that_are_named_are_there(page: Path) -> None:
    known = {variable(name) for name in Settings.model_fields} | OTHER_VARIABLES
    named = set(re.findall(r"\bKVINDEXER_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    assert named <= known
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make (?:-\w+ )?(\w+)", page.read_text())) <= targets


@each_page
def test_metrics_that_are_named_are_exposed(page: Path) -> None:
    exposition = create_app(load_settings()).state.wiring.metrics.exposition().decode()
    known = {family.name for family in text_string_to_metric_families(exposition)}
    for name in set(re.findall(r"\bkvindexer_[a-z0-9_]*[a-z0-9]\b(?!\*|_)", page.read_text())):
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in known, name


@each_page
def test_commands_that_are_named_are_there(page: Path) -> None:
    known = {words for words, _ in commands()}
    groups = {words.rpartition(" ")[0] for words in known} - {"kvindexer"}
    below = "|".join(words.rpartition(" ")[2] for words in known if words.count(" ") > 1)
    for words in re.findall(rf"`kvindexer ([a-z]+(?: (?:{below}))?)\b", page.read_text()):
        assert f"kvindexer {words}" in known | groups, words


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s:]+\.md(?:#[^)]*)?)\)", page.read_text())
    }
    assert {page.resolve() for page in PAGES} - linked <= {ROOT / "README.md"}


def test_every_folder_and_module_is_on_the_map() -> None:
    """docs/architecture.md names what is in app/ and in native/."""
    text = (ROOT / "docs/architecture.md").read_text()
    part = text.split("\n## The folders\n", 1)[1].split("\n## ", 1)[0]
    folders = {path.name for path in (ROOT / "app").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {f"`{name}/`" for name in folders} - set(re.findall(r"`\w+/`", part)) == set()
    modules = {path.name for path in (ROOT / "app").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules - set(re.findall(r"`(\w+\.py)`", part)) == set()
    core = text.split("\n## The native core\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`([\w*]+\.[ch]pp)`", core))
    native = {path.name for path in (ROOT / "native").glob("*.?pp")}
    assert {file for file in native if not any(fnmatch(file, name) for name in named)} == set()
    assert {name for name in named if not any(fnmatch(file, name) for file in native)} == set()
    top = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name in FOLDERS.split("|")}
    assert top - set(re.findall(r"\b(\w+)/", part)) == set()
