"""The indexer under test: a process of its own, what it uses, what it logs, how it ends.

Its bounds are small on purpose (SETTINGS): a bound that is never met has not been tried.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.soak.findings import Findings

START_DEADLINE_S = 60.0
END_DEADLINE_S = 60.0
LINES_KEPT = 200
SETTINGS = {
    "KVINDEXER_LOG_FORMAT": "json",
    "KVINDEXER_TTL_S": "0",
    "KVINDEXER_SWEEP_PAUSE_S": "1",
    "KVINDEXER_PODS_MAX": "32",
    "KVINDEXER_CONTEXTS_MAX": "64",
    "KVINDEXER_PREFIXES_PER_CONTEXT_MAX": "200000",
    "KVINDEXER_ORPHAN_BLOCKS_MAX": "512",
    "KVINDEXER_HINTS_MAX": "256",
    "KVINDEXER_BODY_BYTES_MAX": "262144",
    "KVINDEXER_CONNECTIONS_MAX": "96",
    "KVINDEXER_DUMPS_MAX": "1",
    "KVINDEXER_LIVE_SUBSCRIBERS_MAX": "4",
    "KVINDEXER_LIVE_QUEUE_EVENTS_MAX": "50",
    "KVINDEXER_HEAD_TIMEOUT_S": "2",
    "KVINDEXER_BODY_TIMEOUT_S": "3",
    "KVINDEXER_SEND_TIMEOUT_S": "3",
    "KVINDEXER_SHUTDOWN_GRACE_S": "2",
    "KVINDEXER_ZMQ_QUEUE_BATCHES_MAX": "16",
    "KVINDEXER_ZMQ_QUEUE_BYTES_MAX": "65536",
    "KVINDEXER_ZMQ_HELD_BYTES_MAX": "65536",
    "KVINDEXER_ZMQ_MESSAGE_BYTES_MAX": "1048576",
    "KVINDEXER_SNAPSHOT_INTERVAL_S": "5",
    "KVINDEXER_TOKENIZER_HUB": "false",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a process has at one moment."""

    resident_mib: float
    descriptors: int
    threads: int
    cpu_s: float


class Server:
    """One indexer at a time, always on the same port; `is_up` is False while it ends and starts."""

    def __init__(self, folder: Path, keys_file: Path, findings: Findings) -> None:
        self.is_up = threading.Event()
        self.port = 0
        self.starts = 0
        self._keys_file = keys_file
        self._folder = folder
        self._findings = findings
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the indexer has not been started"
        return self._process.pid

    def start(self) -> None:
        """Returns when it listens. Raises RuntimeError where it does not come up."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVINDEXER_")}
        environment |= SETTINGS | {
            "KVINDEXER_API_KEYS_FILE": str(self._keys_file),
            "KVINDEXER_SNAPSHOT_PATH": str(self._folder / "snapshot"),
            "KVINDEXER_PORT": str(self.port),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )
        self._process = process
        self._reader = threading.Thread(target=self._read_log, args=(process,), name="soak-log")
        self._reader.start()
        watchdog = threading.Timer(START_DEADLINE_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        found = re.fullmatch(r"kvindexer \S+ listens on http://\S+:(\d+)\n", line)
        if found is None:
            process.kill()
            process.wait()
            raise RuntimeError(f"the indexer did not start: {list(self.last_lines)[-5:]}")
        self.port = int(found[1])
        self.starts += 1
        self.is_up.set()

    def end(self) -> float:
        """SIGTERM; the seconds that it took. What is not an orderly end is a violation."""
        process = self._process
        assert process is not None, "the indexer has not been started"
        self.is_up.clear()
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            self._findings.violation("end", f"still there {END_DEADLINE_S:g} s after SIGTERM")
        assert self._reader is not None
        self._reader.join()
        assert process.stdout is not None
        said = process.stdout.read()
        process.stdout.close()
        if code != 0 or said:
            self._findings.violation("end", f"exit status {code}, said {said!r}")
        self._process = None
        return time.monotonic() - began_s

    def kill(self) -> None:
        """For the way out of a soak that failed itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def usage(self) -> Usage:
        root = Path("/proc") / str(self.pid)
        status = dict(
            line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line
        )
        ticks = (root / "stat").read_text().rpartition(")")[2].split()
        return Usage(
            resident_mib=int(status["VmRSS"].split()[0]) / 1024,
            descriptors=len(list((root / "fd").iterdir())),
            threads=int(status["Threads"]),
            cpu_s=(int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"),
        )

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.last_lines.append(line)
                try:
                    level = str(json.loads(line)["level"]).lower()
                except (ValueError, TypeError, KeyError):
                    self._findings.violation("log line", f"not one JSON object: {line!r}")
                    continue
                self._findings.count(f"log lines {level}")
                if level in ("error", "critical") or "Traceback" in line:
                    self._findings.violation("log line", line)
