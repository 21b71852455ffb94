"""Hot requests without a task: what the short way answers at once is answered where the server reads the bytes.

A server makes a task, a scope and two queues for each request, and each of the layers in front of the routes wraps
`send` once more. For a request whose answer needs no waiting that is half of its cost. So the server may ask here
first, with the whole request in its hand (app/serving/short_connections.py). What must hold for every request holds here
too, in the same order and by the same code: ids and metrics (app/api/observation.py), keys and rates (app/api/access.py),
the start (app/api/starting.py), the bound of a body (app/api/short_way.py). Whoever is refused by one of them is handed
back untouched, and refused by the layer itself; tests/serving/test_short_connections.py holds both ways together.

`find` needs the head only and changes nothing: a body that nobody will read is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from app import _native
from app.api.access import MAY_WRITE, Access, Admission
from app.api.observation import RequestObservation
from app.api.short_way import WAYS, ShortWay, Way, read_notation
from app.observability.correlation import CURRENT, Correlation, correlate
from app.start import Start

Headers = Sequence[tuple[bytes, bytes]]


class HotRequest(msgspec.Struct, frozen=True):
    """A POST whose head is understood. `headers` are those of it that an answer may depend on."""

    path: str
    query_string: bytes
    headers: Headers
    way: Way
    notation: str
    admission: Admission | None  # None: nobody needs a key, and there is no rate


class ShortCut:
    """`clock` is that of the rates."""

    def __init__(
        self,
        short_way: ShortWay,
        *,
        start: Start,
        access: Access | None,
        observation: RequestObservation,
        clock: Callable[[], float],
    ) -> None:
        self.body_bytes_max = short_way.body_bytes_max
        self._short_way = short_way
        self._start = start
        self._access = access
        self._observation = observation
        self._clock = clock
        self._heads = _native.HeadBook()
        self._known: list[HotRequest] = []  # by their numbers in it

    def read(self, data: bytes) -> tuple[HotRequest, int, int] | None:
        """The request that `data` begins with, as `find` says, and the bytes of its head and of its body."""
        seen = self._heads.find(data)
        if seen is None:
            return None
        number, head_bytes, body_bytes = seen
        if number is not None:
            return self._known[number], head_bytes, body_bytes
        head = _native.request_head(data)
        assert head is not None, "the book reads heads as they are read here"
        request = self.find(*head[:3])
        if request is None:
            return None
        if self._access is None:
            self._remember(request, data)
        return request, head_bytes, body_bytes

    def _remember(self, request: HotRequest, data: bytes) -> None:
        """It means the same whenever it comes again: the start is over, and nobody needs a key."""
        seen = self._heads.put(data)
        if seen is not None and seen[0] is not None:
            del self._known[seen[0] :]
            self._known.append(request)

    def find(self, path: str, query_string: bytes, headers: Headers) -> HotRequest | None:
        """A POST that `take` may take. None: for all layers, which may refuse it."""
        way = WAYS.get(path)
        if way is None or not self._start.is_over:
            return None
        notation = read_notation(headers, self.body_bytes_max)
        if notation is None:
            return None
        admission = None
        if self._access is not None:
            admission = self._access.admit("POST", path, headers)
            if admission is None or admission.bucket.is_empty(self._clock()):
                return None
        return HotRequest(path, query_string, headers, way, notation, admission)

    def patience_s(self, request: HotRequest) -> float:
        return request.way.patience_s

    def take(
        self, request: HotRequest, body: memoryview, *, opening: bytes, client: tuple[str, int] | None
    ) -> tuple[bytes, bytes] | ASGIApp | None:
        """Head and content of the answer, which begins with `opening`; or whoever goes on with the request, which counts
        as let through; or None, and nothing was done."""
        admission = request.admission
        if admission is not None and not admission.bucket.is_endless and admission.bucket.take(self._clock()):
            return None
        observation = self._observation
        started_s = observation.clock()
        correlation = correlate(request.headers)
        token = CURRENT.set(correlation)
        try:
            content = self._short_way.answer(request.way, request.notation, request.query_string, body)
            if not isinstance(content, bytes):
                return self._going_on(content, correlation, started_s, admission)
            observation.note("POST", request.path, client, request.way.route.path_format, 200, started_s)
        finally:
            CURRENT.reset(token)
        head = b"%bcontent-length: %d\r\ncontent-type: application/json\r\nx-request-id: %b\r\n\r\n" % (
            opening,
            len(content),
            correlation.request_id.encode("ascii"),
        )
        return head, content

    def _going_on(
        self, app: ASGIApp, correlation: Correlation, started_s: float, admission: Admission | None
    ) -> ASGIApp:
        observed = self._observation.going_on(app, correlation, started_s)
        if admission is None:
            return observed
        may_write = admission.may_write

        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            scope[MAY_WRITE] = may_write
            await observed(scope, receive, send)

        return admitted
