"""Text to token ids and back, for pods that have no tokenizer: one token a word, `w17` is token 17.

What a pod answers reads as words of that form, so a conversation that is sent back becomes the very tokens
that the pod computed, and a multi-turn chat finds its cached prefix. Any other word becomes a token by its
checksum.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

OWN_WORD = re.compile(r"w(\d{1,9})")


class Words:
    """`vocabulary` is the number of token ids."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        return [self._token(word) for word in text.split()]

    def decode(self, token_ids: Iterable[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Each message between its role and an end; the assistant's turn is opened behind the last."""
        token_ids: list[int] = []
        for message in messages:
            token_ids += [self._token(f"<|{message['role']}|>"), *self.encode(message["content"])]
            token_ids.append(self._token("<|end|>"))
        return [*token_ids, self._token("<|assistant|>")]

    def _token(self, word: str) -> int:
        own = OWN_WORD.fullmatch(word)
        if own is not None and int(own.group(1)) < self.vocabulary:
            return int(own.group(1))
        return zlib.crc32(word.encode()) % self.vocabulary
