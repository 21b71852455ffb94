"""Lets the whole suite run on another build of the native core: `make sanitize` names one in TEST_CORE.

And takes the deadlines off the property tests: how long an example takes says more about the machine than about us.
(Under CI Hypothesis does so itself, and draws the same examples each time.)
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

import app
from tests.ingest.publisher import Publisher

if "CI" not in os.environ:
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")

# What a shell starts in the background ignores SIGINT, and hands that down: tests interrupt what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _use_core(path: str) -> None:
    spec = importlib.util.spec_from_file_location("app._native", path)
    assert spec is not None, f"{path} is not an extension module"
    assert spec.loader is not None, f"{path} cannot be loaded"
    assert "app._native" not in sys.modules, "the core must be chosen before anything imports it"
    module = importlib.util.module_from_spec(spec)
    sys.modules["app._native"] = module
    spec.loader.exec_module(module)
    app._native = module  # type: ignore[attr-defined]


if _path := os.environ.get("TEST_CORE", ""):
    _use_core(_path)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    try:
        yield made
    finally:
        made.kill()
