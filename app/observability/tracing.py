"""OpenTelemetry spans, where `otlp_endpoint` names who takes them: one for a request, one for a wait inside of it.

A span costs tens of microseconds, many times what a match does. So without a trace of the caller one request of
`otlp_requests_every` has one; with a trace, the caller's `sampled` flag decides. They leave by OTLP over HTTP in
batches, from a thread of the SDK whose queue is bounded (2,048 spans, past it they are lost and the log says so); a
collector that is away costs that thread its patience and no request anything.

The packages come with the extra `otel`; nothing of them is imported without an endpoint, and no
provider is made global, so no other library writes spans here. What the SDK itself reads
from the environment (`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS` ...) holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from app import __version__
from app.config import Settings
from app.errors import InvalidSettings
from app.observability.correlation import Correlation, Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_S = 2.0  # of one batch, further attempts included
FLUSH_MS = 2_000  # at the end, for spans that did not leave yet


class RequestSpan:
    """The span of one request, from its head to the end of its answer."""

    def __init__(self, tracer: Tracer, span: Span, correlation: Correlation) -> None:
        context = span.get_span_context()
        self.correlation = Correlation(
            correlation.request_id, Trace(f"{context.trace_id:032x}", f"{context.span_id:016x}", True)
        )
        self._tracer = tracer
        self._span = span

    def end(self, method: str, route: str, status: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        from opentelemetry.trace import set_span_in_context

        with self._tracer.start_as_current_span(name, context=set_span_in_context(self._span)):
            yield


_REQUEST: ContextVar[RequestSpan | None] = ContextVar("request_span", default=None)


class Spans:
    """`exporter` takes the spans; it is closed with these."""

    def __init__(self, exporter: SpanExporter, *, requests_every: int) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "kvindexer", "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvindexer", __version__)
        self._every = requests_every
        self._passed = 0

    def start(self, correlation: Correlation, method: str, path: str) -> RequestSpan | None:
        """None for a request without a span."""
        # Also where there is none: a task that was made by another's inherits what that one had.
        _REQUEST.set(None)
        if not self._wants(correlation.trace):
            return None
        from opentelemetry.trace import SpanKind

        attributes = {
            "http.request.method": method,
            "url.path": path[:256],
            "kvindexer.request_id": correlation.request_id,
        }
        span = self._tracer.start_span(
            method, _parent(correlation.trace), kind=SpanKind.SERVER, attributes=attributes
        )
        made = RequestSpan(self._tracer, span, correlation)
        _REQUEST.set(made)
        return made

    def close(self) -> None:
        """Sends what is left, for FLUSH_MS at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _wants(self, trace: Trace | None) -> bool:
        if trace is not None:
            return trace.sampled
        if not self._every:
            return False
        self._passed += 1
        if self._passed < self._every:
            return False
        self._passed = 0
        return True


def open_spans(settings: Settings) -> Spans | None:
    """None without an endpoint. Raises InvalidSettings when the extra is not installed."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        detail = f"otlp_endpoint={settings.otlp_endpoint!r}: pip install 'kvindexer[otel]' ({error})"
        raise InvalidSettings(detail) from None
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=EXPORT_TIMEOUT_S)
    return Spans(exporter, requests_every=settings.otlp_requests_every)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """A wait inside of a request, as a span below that of the request where there is one."""
    request = _REQUEST.get()
    if request is None:
        yield
        return
    with request.step(name):
        yield


def _parent(trace: Trace | None) -> Any:
    """The caller's span as the context of a new one; without one an empty context, so that it begins a trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if trace is None:
        return Context()
    caller = SpanContext(
        int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=TraceFlags(1)
    )
    return set_span_in_context(NonRecordingSpan(caller), Context())
