"""wrk as the load: bodies from files, one after the other, on kept connections."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import Server

# A run of `once` ends here, finished or not: wrk has no way to end earlier, and what the server does of its own
# while nobody asks counts as well.
ONCE_SECONDS = 1.0
CONNECTIONS = 32

Kind = tuple[str, str, str, list[bytes]]  # of requests: name, path with query, Content-Type, bodies
WIDE = ", 64 pods"  # behind the name of a kind that all pods answer to

# Arguments: Content-Type, "once" or "again", how many bodies, and the folder of files 0, 1, 2 ...
_SCRIPT = """
local bodies, at, once = {}, 0, false
function init(args)
  wrk.method, wrk.headers["Content-Type"], once = "POST", args[1], args[2] == "once"
  for i = 1, tonumber(args[3]) do
    local file = assert(io.open(args[4] .. "/" .. (i - 1), "rb"))
    bodies[i] = wrk.format(nil, nil, nil, file:read("*a"))
    file:close()
  end
end
function request()
  at = at + 1
  if at > #bodies then
    if once then wrk.thread:stop() end
    at = 1
  end
  return bodies[at]
end
function done(summary, latency)
  local failed = summary.errors
  io.write(string.format('RESULT {"requests":%d,"seconds":%f,"errors":%d,"p50_us":%f,"p99_us":%f}\\n',
    summary.requests, summary.duration / 1e6,
    failed.status + failed.connect + failed.read + failed.write + failed.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk saw, and the server's CPU time during it."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    cpu_us: float  # of the server, a request

    @classmethod
    def of(cls, runs: Sequence[Load]) -> Load:
        """Several runs of the same as one: requests and CPU time of all, latencies as the median run saw them."""
        requests = sum(run.requests for run in runs)
        return cls(
            requests,
            sum(run.seconds for run in runs),
            statistics.median(run.p50_us for run in runs),
            statistics.median(run.p99_us for run in runs),
            sum(run.cpu_us * run.requests for run in runs) / requests,
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu_us:7.1f} us CPU   {self.requests / self.seconds:8.0f} req/s   "
            f"p50 {self.p50_us:6.0f} us   p99 {self.p99_us:6.0f} us"
        )


def is_installed() -> bool:
    return shutil.which("wrk") is not None


class Wrk:
    """`folder` is for the script and the bodies; `cores` are those that wrk may use."""

    def __init__(self, folder: Path, cores: set[int] | None, seconds: float) -> None:
        self._folder = folder
        self._cores = cores
        self._seconds = seconds
        self._script = folder / "load.lua"
        self._script.write_text(_SCRIPT)

    def drive_in_turns(self, server: Server, one: Kind, other: Kind, rounds: int) -> tuple[Load, Load]:
        """Each once a round, so that what else the machine does falls on both."""
        runs: tuple[list[Load], list[Load]] = ([], [])
        for _ in range(rounds):
            for (_, path, content_type, bodies), loads in zip((one, other), runs, strict=True):
                loads.append(self.drive(server, path, bodies, content_type))
        return Load.of(runs[0]), Load.of(runs[1])

    def drive(
        self, server: Server, path: str, bodies: Sequence[bytes], content_type: str, *, once: bool = False
    ) -> Load:
        """Every body in turn: again and again for a time, or each at most `once`."""
        for number, body in enumerate(bodies):
            (self._folder / str(number)).write_bytes(body)
        seconds = ONCE_SECONDS if once else self._seconds
        command = [
            "wrk", "--threads=1", f"--connections={CONNECTIONS}", f"--duration={max(1, round(seconds))}s",
            "--latency", f"--script={self._script}", server.url(path),
            "--", content_type, "once" if once else "again", str(len(bodies)), str(self._folder),
        ]  # fmt: skip
        cores = self._cores
        before = server.cpu_s()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=True,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
        cpu_s = server.cpu_s() - before
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        seen = json.loads(line.removeprefix("RESULT "))
        assert seen["errors"] == 0, f"{path}: {seen['errors']} of {seen['requests']} requests failed"
        requests = seen["requests"]
        return Load(requests, seen["seconds"], seen["p50_us"], seen["p99_us"], cpu_s / requests * 1e6)
