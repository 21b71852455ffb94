"""Bounds that commands name in their help too: without pydantic, which a short command has no other use for."""

from __future__ import annotations

BLOCK_SIZE_MAX = 65_536
TOKEN_ID_MAX = 2**32 - 1
FUZZY_DISTANCE_MAX = 8
FUZZY_MATCHES_MAX = 256
