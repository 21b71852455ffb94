"""The dashboard: static files that use the public API only. No build, no inline script, nothing from another host."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

_FILES = Path(__file__).parent.parent / "dashboard"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def page(status: int, headers: dict[str, str]) -> HTMLResponse:
    """The page, which asks for a key where one is needed: a browser without one gets it with the 401."""
    content = (_FILES / "index.html").read_bytes()
    return HTMLResponse(content, status, {**headers, "Content-Security-Policy": _POLICY})


def install(app: FastAPI) -> None:
    """Serves the page at `/` and what it loads below `/dashboard`."""

    @app.get("/", include_in_schema=False)
    async def home() -> HTMLResponse:
        return page(200, {})

    app.mount("/dashboard", StaticFiles(directory=_FILES), name="dashboard")
