"""The made-up traffic: repeatable, and shared at the beginnings as its kinds promise."""

from __future__ import annotations

import itertools

import pytest

from app.demo.traffic import AGENT, CHAT, KINDS, RAG, Kind, Session, sessions


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_session_grows_and_keeps_its_beginning(kind: Kind) -> None:
    for seed in range(20):
        session = Session(kind, seed)
        assert kind.turns[0] <= session.turns_left <= kind.turns[1]
        turns = session.turns_left
        for _ in range(turns):
            before = session.prompt
            answer = list(range(session.answer_tokens()))
            assert kind.answer_tokens[0] <= len(answer) <= kind.answer_tokens[1]
            assert kind.pause_s[0] <= session.pause_s() <= kind.pause_s[1]
            session.take(answer)
            if not session.is_over:
                assert session.prompt[: len(before) + len(answer)] == before + answer
                assert len(session.prompt) > len(before) + len(answer)
        assert session.is_over


def test_sessions_of_a_kind_begin_alike_and_kinds_do_not() -> None:
    beginnings = {kind: {tuple(Session(kind, seed).prompt[:200]) for seed in range(100)} for kind in KINDS}
    assert {kind.name: len(found) for kind, found in beginnings.items()} == {"chat": 8, "agent": 4, "rag": 1}
    assert not beginnings[CHAT] & beginnings[AGENT]
    documents = [tuple(Session(RAG, seed).prompt[200:2_600]) for seed in range(200)]
    assert 10 < len(set(documents)) <= 40
    assert max(documents.count(document) for document in documents) > 20


def test_a_seed_decides_about_everything() -> None:
    def first(seed: int) -> list[tuple[float, str, list[int]]]:
        made = itertools.islice(sessions(2.0, seed), 20)
        return [(wait_s, session.kind.name, session.prompt) for wait_s, session in made]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_the_rate_is_kept() -> None:
    waits = [wait_s for wait_s, _ in itertools.islice(sessions(4.0, 1), 4_000)]
    assert sum(waits) == pytest.approx(1_000, rel=0.1)
