"""The HTTP server around the application: one socket, uvicorn on uvloop and httptools, an orderly end."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from app import __version__, logs
from app.api.wiring import wired
from app.config import Settings
from app.errors import CannotListen
from app.main import create_app

_BACKLOG = 2_048


def run(settings: Settings) -> bool:
    """Serves until SIGINT or SIGTERM; False when the application did not come up. Raises CannotListen."""
    logs.configure(settings.log_level, settings.log_format)
    _allow_descriptors()
    app = create_app(settings)
    # Bound before the server starts: the fault is one sentence, and a free port is known when it is printed.
    listener = _listen(settings.host, settings.port)
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=settings.log_level,
            access_log=False,
            server_header=False,
            limit_concurrency=settings.connections_max,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=settings.shutdown_grace_s,
        ),
        _address(listener),
        on_end=wired(app).service.live.close,
    )

    def give_up() -> None:
        server.should_exit = True

    app.start.on_failure = give_up
    # uvicorn raises the signal that ended it once more when it is done: an orderly end is not a failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    return server.started and not app.start.failed


class _Server(uvicorn.Server):
    """Says where it listens, and calls `on_end` before it waits for requests in progress to end."""

    def __init__(self, config: uvicorn.Config, address: str, *, on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._address = address
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"kvindexer {__version__} listens on {self._address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        await super().shutdown(sockets)


def _allow_descriptors() -> None:
    """As many as the system lets us have: the usual soft bound of 1,024 ends at some 300 followed ranks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        said = os.strerror(error.errno) if error.errno else str(error)
        hint = "; another process has it, --port takes another" if error.errno == errno.EADDRINUSE else ""
        raise CannotListen(f"cannot listen on {host}:{port}: {said}{hint}") from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
