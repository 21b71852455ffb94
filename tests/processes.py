"""`python -m app` as a process of its own, forked from one that has loaded the packages of others.

Loading those is two thirds of a start, and the suite starts hundreds. What is ours is loaded by each process anew, in
the order in which its command loads it, so nothing of ours is shared, random keys included. One template serves a
worker of pytest. The process is a child of a keeper, which tells how it ended and lets go of it once that was read:
until then its number is nobody else's.

Started as the interpreter does it: tests/test_installed.py, tests/demo, tests/deploy and tests/experiment.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "fastapi.openapi.docs",
    "fastapi.staticfiles",
    "httptools",
    "httpx",
    "msgspec",
    "prometheus_client.parser",
    "pydantic_settings",
    "rich.markdown",
    "rich.progress",
    "rich.table",
    "redis.asyncio.cluster",
    "typer.rich_utils",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "zmq.asyncio",
    "zmq.utils.monitor",
)
_NUMBER = struct.Struct("i")
_REQUEST_BYTES_MAX = 1 << 18


class Process:
    """What tests use of subprocess.Popen."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._ended, theirs = socket.socketpair()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        request = json.dumps([arguments, environment]).encode()
        socket.send_fds(_template(), [request], [theirs.fileno(), out_end, err_end])
        theirs.close()
        os.close(out_end)
        os.close(err_end)
        self.args = arguments
        self.stdout = open(out)  # noqa: SIM115
        self.stderr = open(err)  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = self._read()
        self._said: dict[int, str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = self._read()
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None, "it was told how the process ended"
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that is left to read of both outputs, once the process has ended."""
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._listen, args=(number,), daemon=True) for number in (0, 1)
            ]
            for reader in self._readers:
                reader.start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._said[0], self._said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _listen(self, number: int) -> None:
        with (self.stdout, self.stderr)[number] as pipe:
            self._said[number] = pipe.read()

    def _read(self) -> int:
        return int(_NUMBER.unpack(self._ended.recv(_NUMBER.size, socket.MSG_WAITALL))[0])


@functools.cache
def _template() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.processes", str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> None:
    """Comes back in a process that was asked for, which is `python -m app` from there on, and at the end."""
    for package in PACKAGES:
        importlib.import_module(package)
    ours = sorted(name for name in sys.modules if name.split(".")[0] == "app")
    assert not ours, f"{ours} would be shared"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork has one thread, whatever others hold"
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
        if not request:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            keep(*descriptors)
            arguments, environment = json.loads(request)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = ["-m", *arguments]
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(ended: int, out: int, err: int) -> None:
    """Comes back in a child; the keeper itself waits for its end, tells it, and is gone."""
    told = socket.socket(fileno=ended)
    pid = os.fork()
    if pid == 0:
        told.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        return
    # It has nothing of the process open, or nobody would see the end of an output.
    for descriptor in (1, 2, out, err):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told.sendall(_NUMBER.pack(pid))
    how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert how is not None
    code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
    with contextlib.suppress(OSError):  # nobody is there who wants to know
        told.sendall(_NUMBER.pack(code))
        told.recv(1)
    os.waitpid(pid, 0)
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("app", run_name="__main__", alter_sys=True)
