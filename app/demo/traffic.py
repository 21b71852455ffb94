"""Made-up traffic of the three kinds that share prefixes in different ways, as token ids.

    chat    a system prompt an application, then turns: what was said before, the pod's own answer included
    agent   a long prompt of tools, then many short steps in quick succession on the growing history
    rag     one question behind one of a few long documents, some of which are asked for far more often

Sessions begin at random moments (open loop: a slow fleet gets no less work), and wait between their turns. A
seed decides about everything but the answers, so two policies can be given the very same traffic.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

VOCABULARY = 32_000
APPLICATIONS, AGENTS, DOCUMENTS = 8, 4, 40


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Ranges are (least, most): tokens, turns and seconds; `weight` is its part of all sessions."""

    name: str
    weight: float
    turns: tuple[int, int]
    said_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    pause_s: tuple[float, float]


CHAT = Kind("chat", 0.35, turns=(2, 6), said_tokens=(30, 150), answer_tokens=(30, 80), pause_s=(1.0, 4.0))
AGENT = Kind("agent", 0.15, turns=(4, 10), said_tokens=(80, 300), answer_tokens=(15, 40), pause_s=(0.2, 0.8))
RAG = Kind("rag", 0.5, turns=(1, 1), said_tokens=(20, 60), answer_tokens=(30, 60), pause_s=(0.0, 0.0))
KINDS = (CHAT, AGENT, RAG)


class Session:
    """One conversation: `prompt` is what the next turn sends, until `is_over`."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._draw = random.Random(seed)
        self.kind = kind
        self.turns_left = self._draw.randint(*kind.turns)
        self._history = self._beginning()
        self._say()

    @property
    def prompt(self) -> list[int]:
        return list(self._history)

    @property
    def is_over(self) -> bool:
        return self.turns_left == 0

    def answer_tokens(self) -> int:
        return self._draw.randint(*self.kind.answer_tokens)

    def pause_s(self) -> float:
        return self._draw.uniform(*self.kind.pause_s)

    def take(self, answer: list[int]) -> None:
        """The answer is heard, and unless that was the last turn something is said to it."""
        self.turns_left -= 1
        if not self.is_over:
            self._history += answer
            self._say()

    def _say(self) -> None:
        self._history += _text(self._draw, self._draw.randint(*self.kind.said_tokens))

    def _beginning(self) -> list[int]:
        if self.kind is CHAT:
            return fixed_text("application", self._draw.randrange(APPLICATIONS), 400)
        if self.kind is AGENT:
            return fixed_text("agent", self._draw.randrange(AGENTS), 1_600)
        # A document's popularity falls with its number, as 1/n.
        weights = [1 / (number + 1) for number in range(DOCUMENTS)]
        [document] = self._draw.choices(range(DOCUMENTS), weights)
        return [*fixed_text("rag", 0, 200), *fixed_text("document", document, 2_400)]


def sessions(rate: float, seed: int) -> Iterator[tuple[float, Session]]:
    """Endless: seconds since the last one, and the session that begins then; `rate` of them a second."""
    draw = random.Random(seed)
    weights = [kind.weight for kind in KINDS]
    while True:
        [kind] = draw.choices(KINDS, weights)
        yield draw.expovariate(rate), Session(kind, draw.getrandbits(32))


def fixed_text(name: str, number: int, tokens: int) -> list[int]:
    """The same tokens whenever it is asked for."""
    return _text(random.Random(f"{name} {number}"), tokens)


def _text(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]
