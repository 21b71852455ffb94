"""Redis as operators run it: with TLS, and as a cluster of three nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.replication.redis_server import RedisServer, cluster_options

DEADLINE_S = 60.0
SLOTS = 16_384
NODES = 3


class Certificates:
    """An authority of the test's own, and a server's certificate by it for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "authority.crt"
        self.server = folder / "server.crt"
        self.server_key = folder / "server.key"
        key = folder / "authority.key"
        subject = ("-subj", "/CN=a test's authority")
        self._openssl("req", "-x509", *_new_key(key), "-days", "2", *subject, "-out", str(self.authority))
        request = folder / "server.csr"
        self._openssl("req", *_new_key(self.server_key), "-subj", "/CN=localhost", "-out", str(request))
        names = folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        signing = ("-CA", str(self.authority), "-CAkey", str(key), "-CAcreateserial", "-days", "2")
        self._openssl(
            "x509", "-req", "-in", str(request), *signing, "-extfile", str(names), "-out", str(self.server)
        )

    def _openssl(self, *arguments: str) -> None:
        program = shutil.which("openssl")
        if program is None:
            assert not os.environ.get("CI"), "openssl is missing: see .ci/run"
            pytest.skip("openssl is not installed")
        done = subprocess.run([program, *arguments], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _new_key(path: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path))


class TlsServer(RedisServer):
    """Speaks TLS and nothing else."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.authority = certificates.authority
        super().__init__(
            folder,
            options=(
                *("--tls-cert-file", str(certificates.server)),
                *("--tls-key-file", str(certificates.server_key)),
                *("--tls-ca-cert-file", str(certificates.authority)),
                *("--tls-auth-clients", "no"),
            ),
            tls=True,
        )

    @property
    def url(self) -> str:
        return f"rediss://localhost:{self.port}/0?ssl_ca_certs={self.authority}"


class Cluster:
    """Masters, no copies; each has its share of the slots."""

    def __init__(self, folder: Path, count: int = NODES) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for number in range(count):
                place = folder / f"node-{number}"
                place.mkdir()
                options = (*cluster_options(), "--cluster-node-timeout", "2000")
                self.nodes.append(RedisServer(place, options=options))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.nodes[0].port}/0"

    def _join(self) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                begin, end = SLOTS * number // len(self.nodes), SLOTS * (number + 1) // len(self.nodes)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1))
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
                if node is not first:
                    with first.client() as known:
                        bus = known.config_get("cluster-port")["cluster-port"]
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", str(first.port), bus)
        deadline = time.monotonic() + DEADLINE_S
        while not all(self._is_whole(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the nodes make a cluster"
            time.sleep(0.05)

    def _is_whole(self, node: RedisServer) -> bool:
        with node.client() as client:
            about = client.cluster("INFO")
        return bool(about["cluster_state"] == "ok" and about["cluster_known_nodes"] == str(len(self.nodes)))

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
