"""Whom blocks were stored for."""

from __future__ import annotations

from pydantic import Field

from app.schemas.fields import Body


class OwnerRow(Body):
    """An agent that blocks were stored for."""

    owner: str
    blocks: int = Field(
        description="Its blocks, counted on every rank and tier; dead ones until they are swept."
    )


class OwnersResponse(Body):
    """Owners, by name."""

    owners: list[OwnerRow]
