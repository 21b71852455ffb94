"""The HTTP server around the application: one socket, uvicorn on uvloop and httptools, an orderly end."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from app import __version__
from app.api.wiring import wired
from app.config import Settings
from app.errors import CannotListen
from app.main import create_app
from app.observability import logs
from app.serving.connections import BoundedProtocol, ConnectionLimits
from app.serving.short_connections import Outbox, ShortConnection
from app.serving.tls import ServerTls, server_tls

logger = logging.getLogger(__name__)

_BACKLOG = 2_048
_TICKS_A_SECOND = 10  # uvicorn's
_CUT_GRACE_S = 1  # for what serves a connection to see that it was cut


def run(settings: Settings) -> bool:
    """Serves until SIGINT or SIGTERM; False when the application did not come up. Raises CannotListen."""
    logs.configure(settings.log_level, settings.log_format)
    _allow_descriptors()
    tls = server_tls(settings)
    app = create_app(settings)
    limits = wired(app).connections
    # Bound before the server starts: the fault is one sentence, and a free port is known when it is printed.
    listener = _listen(settings.host, settings.port)
    _warn_of_open_doors(settings, listener)
    protocol = (
        functools.partial(BoundedProtocol, limits)
        if app.short_cut is None
        else functools.partial(ShortConnection, app.short_cut, Outbox(), limits)
    )
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=settings.log_level,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=settings.shutdown_grace_s + _CUT_GRACE_S,
        ),
        _address(listener, tls),
        limits,
        tls,
        grace_s=settings.shutdown_grace_s,
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
        gc.unfreeze()  # or the native core counts what is left at the end as leaked
    return server.started and not app.start.failed


class _Server(uvicorn.Server):
    """Says where it listens, looks after connections and certificate, and calls `on_end` before it waits for
    requests in progress to end."""

    def __init__(
        self,
        config: uvicorn.Config,
        address: str,
        limits: ConnectionLimits,
        tls: ServerTls | None,
        *,
        grace_s: int,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._address = address
        self._limits = limits
        self._tls = tls
        self._grace_s = grace_s
        self._on_end = on_end
        config.load()
        if tls is not None:
            config.ssl = tls.context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is there now stays for good. Looked through again by every full collection, it stops the process for
        # 30 ms, and a backlog of batches makes collections frequent.
        gc.collect()
        gc.freeze()
        if self.started:
            print(f"kvindexer {__version__} listens on {self._address}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        self._limits.sweep(time.monotonic())
        if self._tls is not None and counter % _TICKS_A_SECOND == 0:
            self._tls.renew()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        cut = asyncio.get_running_loop().call_later(self._grace_s, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        """Ends what clients hold up. uvicorn would cancel the tasks behind, each with a traceback in the log."""
        left = list(self.server_state.connections)
        if left:
            logger.warning(
                "%d connections were cut: they were in use still shutdown_grace_s = %d s after the signal to end",
                len(left),
                self._grace_s,
            )
        for connection in left:
            connection.transport.abort()


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


def _address(listener: socket.socket, tls: ServerTls | None) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _warn_of_open_doors(settings: Settings, listener: socket.socket) -> None:
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return
    is_keyless = not settings.api_keys and settings.api_keys_file is None
    if is_keyless and settings.tls_client_ca is None:
        logger.warning(
            "whoever reaches %s can read and change everything: no API keys are set. Set KVINDEXER_API_KEYS or "
            "KVINDEXER_API_KEYS_FILE, or listen on 127.0.0.1",
            host,
        )
    elif not is_keyless and settings.tls_certificate is None:
        logger.warning(
            "API keys come to %s as plain text: set KVINDEXER_TLS_CERTIFICATE, unless a proxy or mesh encrypts",
            host,
        )


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
