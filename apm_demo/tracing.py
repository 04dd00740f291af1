"""The web service, traced with OpenTelemetry's own SDK: what any service does that knows nothing of kivi.

One resource for each server (``service.namespace``, ``service.name``, ``service.instance.id``: customer, application,
server), one exporter for all. Where spans go is the SDK's business: they are sent by a thread of its own, in batches,
and again if that fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from apm_demo.endpoints import Endpoint

__all__ = ["Traced", "Tracing"]

_SEND_EVERY_MS: Final = 500
_TRY_FOR_S: Final = 30.0


class Tracing:
    """Sends spans to ``endpoint``, "http://host:port" or, with TLS, "https://host:port"."""

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint, timeout=_TRY_FOR_S), schedule_delay_millis=_SEND_EVERY_MS
        )

    def tracer(self, customer: str, application: str, server: str) -> Tracer:
        place = {"service.namespace": customer, "service.name": application, "service.instance.id": server}
        provider = TracerProvider(resource=Resource.create(place), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer("apm_demo")

    def close(self) -> None:
        """Sends what is left."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class Traced:
    """Middleware: a SERVER span for each call of an endpoint, child of the caller's if it sent a ``traceparent``.

    What is within finds the span in its own ``traceparent``: the landed events have the trace ids of the spans.
    """

    def __init__(self, app: ASGIApp, endpoints: dict[tuple[str, str], Endpoint], tracer: Tracer) -> None:
        self._app = app
        self._endpoints = endpoints
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope.get("method", ""), scope.get("path", "")))
        if scope["type"] != "http" or endpoint is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        said = {"http.request.method": endpoint.method, "http.route": endpoint.path}
        with self._tracer.start_as_current_span(
            endpoint.name, context=extract(headers), kind=SpanKind.SERVER, attributes=said
        ) as span:

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            within: dict[str, str] = {}
            inject(within)
            own = [(name.encode(), value.encode()) for name, value in within.items()]
            kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in within]
            await self._app({**scope, "headers": [*kept, *own]}, receive, watch)
