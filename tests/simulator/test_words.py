"""Text to tokens and back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from app.simulator.bodies import FaultsBody
from app.simulator.pod import Pod, PodSettings
from app.simulator.server import PodServer
from app.simulator.words import Words

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_what_is_decoded_encodes_to_itself() -> None:
    words = Words(1_000)
    assert words.encode(words.decode([0, 17, 999])) == [0, 17, 999]
    assert all(0 <= token < 1_000 for token in words.encode("w1000 any other words, w99999999999"))


def test_equal_words_are_equal_tokens() -> None:
    words = Words(32_000)
    assert words.encode("red  green\nred") == [words.encode(w)[0] for w in ("red", "green", "red")]


def test_chat_is_a_prefix_of_its_continuation() -> None:
    words = Words(32_000)
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = {"role": "assistant", "content": "w5 w6"}
    whole = words.encode_chat([*first, answer, {"role": "user", "content": "again"}])
    begun = words.encode_chat(first)
    assert whole[: len(begun) + 2] == [*begun, 5, 6]


def test_every_route_and_fault_is_documented() -> None:
    text = DOCUMENT.read_text()
    server = PodServer(Pod(PodSettings()))
    assert all(f" {route.path}" in text for route in server.app.routes if hasattr(route, "path"))
    faults = [field.name for field in msgspec.structs.fields(FaultsBody)]
    assert all(f"`{name}" in text for name in faults)
