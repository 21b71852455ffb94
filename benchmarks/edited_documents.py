"""Documents and their edited versions, as token ids, from text that every Python brings along.

The text is the language reference behind `help()` (pydoc_data.topics). A token is a word with the space before
it, a sign or other white space, about as the tokenizers of language models cut; its id is its place in the order of
first appearance.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pydoc_data.topics import topics

PASSAGE_TOKENS = 60  # about a paragraph


@dataclasses.dataclass(frozen=True)
class Edits:
    """Chances: that a passage is dropped, swapped with the next, or followed by a passage of another document;
    that a token is replaced by another."""

    drop: float = 0.06
    swap: float = 0.06
    insert: float = 0.06
    replace: float = 0.004


def documents(tokens_min: int = 800) -> list[list[int]]:
    ids: dict[str, int] = {}
    found = []
    for name in sorted(topics):
        tokens = [ids.setdefault(word, len(ids)) for word in re.findall(r" ?\w+| ?[^\w\s]|\s+", topics[name])]
        if len(tokens) >= tokens_min:
            found.append(tokens)
    return found


def edit(
    tokens: Sequence[int], others: Sequence[Sequence[int]], edits: Edits, chance: random.Random
) -> list[int]:
    passages = [list(tokens[i : i + PASSAGE_TOKENS]) for i in range(0, len(tokens), PASSAGE_TOKENS)]
    for i in range(len(passages) - 1):
        if chance.random() < edits.swap:
            passages[i], passages[i + 1] = passages[i + 1], passages[i]
    result: list[int] = []
    for passage in passages:
        if chance.random() >= edits.drop:
            result += passage
        if chance.random() < edits.insert:
            other = chance.choice(others)
            begin = chance.randrange(len(other) - PASSAGE_TOKENS)
            result += other[begin : begin + chance.randint(10, PASSAGE_TOKENS)]
    vocabulary = max(map(max, others)) + 1
    return [chance.randrange(vocabulary) if chance.random() < edits.replace else token for token in result]
