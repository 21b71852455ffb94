"""Whom blocks were stored for: the agents that posted events name as `owner`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.document import described
from app.api.wiring import wiring_of
from app.schemas.owners import OwnersResponse
from app.service.owners import OwnerInfo

router = APIRouter(prefix="/v1/owners", tags=["owners"])


@router.get("", **described(OwnersResponse))
async def list_owners(request: Request) -> Response:
    """Every owner that blocks were stored for, by name."""
    bodies.refuse_query(request)
    return bodies.answer(request, _shown(wiring_of(request).service.owners.all()))


@router.delete("/{owner:path}", **described(OwnersResponse))
async def clear_owner(owner: str, request: Request) -> Response:
    """Forgets that blocks were stored for an owner and its roles (`agent1` stands for `agent1:role` too).

    The blocks stay where they are: for their other owners, or for nobody. Returns whose they were.
    """
    bodies.refuse_query(request)
    return bodies.answer(request, _shown(await wiring_of(request).writer.clear_owner(owner)))


def _shown(owners: Iterable[OwnerInfo]) -> dict[str, Any]:
    return {"owners": [dataclasses.asdict(info) for info in owners]}
