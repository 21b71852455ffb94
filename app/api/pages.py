"""The dashboard: static files that use the public API only. No build step, no inline script, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

_FILES = Path(__file__).parent.parent / "dashboard"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def install(app: FastAPI) -> None:
    """Serves the page at `/` and what it loads below `/dashboard`."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_FILES / "index.html", headers={"Content-Security-Policy": _POLICY})

    app.mount("/dashboard", StaticFiles(directory=_FILES), name="dashboard")
