"""The part of the Kubernetes API that lists and watches pods, over real HTTP: versions, pages, bookmarks, 410, rights.

Objects have the fields of the API's `Pod` and many that nobody asks for, as real ones do. Every change has a version;
a watch brings what came after the version that it names, or 410 when that is forgotten.
"""

from __future__ import annotations

import dataclasses
import http.server
import json
import socket
import ssl
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "inference"
TOKEN = "the-token"


@dataclasses.dataclass
class Faults:
    """`gone_as_event` tells 410 inside of a watch instead of as its status."""

    status: int | None = None
    gone_as_event: bool = False
    garbage: bytes | None = None  # instead of a list
    garbage_event: bytes | None = None  # as the first line of a watch
    gone_pages: int = 0  # so many second pages are 410


class KubernetesApi:
    def __init__(self, certificate: Path | None = None) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, str]] = []
        self.tokens = {TOKEN}
        self.faults = Faults()
        self.page_max = 1_000
        self.watches = 0  # open now
        self._version = 100
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._forgotten = 0
        self._changed = threading.Condition()
        self._generation = 0  # watches of an older one end
        self._cut = False
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that left is no fault of this server."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    # -- what happens in the cluster

    def put(
        self,
        name: str,
        *,
        uid: str = "uid-1",
        ip: str | None = "10.0.0.1",
        phase: str = "Running",
        labels: dict[str, str] | None = None,
    ) -> None:
        with self._changed:
            kind = "MODIFIED" if name in self.pods else "ADDED"
            pod = self.pods[name] = self._pod(name, uid, ip, phase, labels or {"app": "vllm"})
            self._append(kind, pod)

    def delete(self, name: str) -> None:
        with self._changed:
            pod = self.pods.pop(name)
            self._append(
                "DELETED", {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._next())}}
            )

    def delete_unseen(self, name: str) -> None:
        """As if it happened while nobody watched, and was forgotten."""
        with self._changed:
            del self.pods[name]
            self._next()

    def bookmark(self) -> int:
        """A version that changes nothing else."""
        with self._changed:
            pod = {
                "kind": "Pod",
                "metadata": {"resourceVersion": str(self._next())},
                "spec": {},
                "status": {},
            }
            self._append("BOOKMARK", pod)
            return self._version

    def forget(self) -> None:
        """All versions until now are too old for a watch."""
        with self._changed:
            self._forgotten = self._next()
            self._log.clear()

    def end_watches(self, *, cut: bool = False) -> None:
        """`cut` ends the connections in the middle of the answer."""
        with self._changed:
            self._generation += 1
            self._cut = cut
            self._changed.notify_all()

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _append(self, kind: str, pod: dict[str, Any]) -> None:
        self._log.append((self._version, kind, pod))
        self._changed.notify_all()

    def _pod(self, name: str, uid: str, ip: str | None, phase: str, labels: dict[str, str]) -> dict[str, Any]:
        address = {} if ip is None else {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "192.168.0.1"}
        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "uid": uid,
                "resourceVersion": str(self._next()),
                "labels": labels,
                "managedFields": [{"manager": "kube-controller-manager", "fieldsV1": {"f:metadata": {}}}],
            },
            "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai", "ports": []}]},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}], **address},
        }

    # -- HTTP

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.requests.append(query)
        bearer = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if bearer not in self.tokens:
            self._refuse(handler, 401, "Unauthorized")
        elif self.faults.status is not None:
            self._refuse(handler, self.faults.status, "a fault")
        elif parts.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self._refuse(handler, 403, f"pods is forbidden: cannot list resource in {parts.path}")
        elif query.get("watch") == "1":
            self._watch(handler, query)
        else:
            self._list(handler, query)

    def _refuse(self, handler: http.server.BaseHTTPRequestHandler, code: int, message: str) -> None:
        _answer(handler, code, _status(code, message))

    def _list(self, handler: http.server.BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        if self.faults.garbage is not None:
            _answer(handler, 200, self.faults.garbage)
            return
        first = int(query.get("continue", "0"))
        if first and self.faults.gone_pages:
            self.faults.gone_pages -= 1
            self._refuse(handler, 410, "The provided continue parameter is too old")
            return
        with self._changed:
            chosen = [pod for pod in self.pods.values() if _matches(pod, query["labelSelector"])]
            size = min(int(query["limit"]), self.page_max)
            more = {"continue": str(first + size)} if first + size < len(chosen) else {}
            page = {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self._version), **more},
                "items": chosen[first : first + size],
            }
        _answer(handler, 200, json.dumps(page).encode())

    def _watch(self, handler: http.server.BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"])
        with self._changed:
            generation, is_gone = self._generation, version < self._forgotten
        if is_gone and not self.faults.gone_as_event:
            self._refuse(handler, 410, "too old resource version")
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        self.watches += 1
        try:
            if self.faults.garbage_event is not None:
                _chunk(handler, self.faults.garbage_event)
            if is_gone:
                _chunk(handler, _event("ERROR", json.loads(_status(410, "too old resource version"))))
            else:
                self._bring(handler, version, query, generation)
        finally:
            self.watches -= 1
        if self._cut:
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            handler.wfile.write(b"0\r\n\r\n")

    def _bring(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        version: int,
        query: dict[str, str],
        generation: int,
    ) -> None:
        until_s = time.monotonic() + int(query["timeoutSeconds"])
        while True:
            with self._changed:
                news = [entry for entry in self._log if entry[0] > version]
                if not news:
                    if generation != self._generation or time.monotonic() > until_s:
                        return
                    self._changed.wait(1.0)
                    continue
            for number, kind, pod in news:
                version = number
                if kind == "BOOKMARK" or _matches(pod, query["labelSelector"]):
                    line = _event(kind, pod)
                    # In two pieces: whoever reads must put lines together.
                    _chunk(handler, line[: len(line) // 2])
                    _chunk(handler, line[len(line) // 2 :])


def _matches(pod: dict[str, Any], selector: str) -> bool:
    return all(
        pod["metadata"]["labels"].get(part.partition("=")[0]) == part.partition("=")[2]
        for part in selector.split(",")
    )


def _status(code: int, message: str) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": code}).encode()


def _event(kind: str, pod: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": pod}).encode() + b"\n"


def _answer(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _chunk(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
    handler.wfile.flush()
