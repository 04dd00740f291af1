"""``kivi up``: a server for who has services and no configuration yet: it takes spans, and has percentiles.

::

    kivi up                       its data in ./kivi-data, which stays; Ctrl-C ends it
    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 opentelemetry-instrument python service.py
    kivi rollup invocations_endpoint_5m --by route --columns calls,p99_us

It is ``kivi serve`` on loopback, with the ports that OpenTelemetry's exporters ask for if nobody says otherwise, and
takes its flags: what is given stands in for what this would choose.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

__all__ = ["CHOICES", "up"]

CHOICES: Final = {
    "data": "kivi-data",
    "otlp": "localhost:4317",
    "http": "localhost:7421,localhost:4318",
}
_METRICS: Final = "OTEL_EXPORTER_OTLP_METRICS_"


def up(args: argparse.Namespace) -> int:
    """Serves until it is told to stop. Raises InvalidArgument, among others for a port that is in use."""
    from kivi_server.options import options_of, printed

    options = options_of(args, otherwise=CHOICES)
    if args.print_settings:
        print(printed(options))
        return 0
    from kivi.runtime.imports import uncollected

    with uncollected():
        from kivi_server.process.serve import open_store, run

    def and_told(options: Any, stack: contextlib.ExitStack) -> tuple[Any, Callable[[Any], None]]:
        store, listens = open_store(options, stack)

        def told(options: Any) -> None:
            listens(options)
            print(_guide(options), flush=True)

        return store, told

    return run(options, and_told)


def _guide(options: Any) -> str:
    http = "https" if options.tls_cert else "http"
    page, *others = options.http.split(",")
    lines = [f"kivi is up; its data are in {os.path.abspath(options.data)}", ""]
    if options.otlp:
        where, how = f"OTEL_EXPORTER_OTLP_ENDPOINT={http}://", "OTEL_EXPORTER_OTLP_PROTOCOL="
        lines += [
            "Send it spans and metrics, from any SDK or collector of OpenTelemetry:",
            f"    export {where}{(others or [page])[-1]} {how}http/protobuf",
            f"or  export {where}{options.otlp} {how}grpc",
            "and of its metrics differences, with histograms that percentiles can be had of:",
            f"    export {_METRICS}TEMPORALITY_PREFERENCE=delta",
            f"    export {_METRICS}DEFAULT_HISTOGRAM_AGGREGATION=base2_exponential_bucket_histogram",
            "and no logs, which it does not take:",
            "    export OTEL_LOGS_EXPORTER=none",
            "",
        ]
    asked = "rollup invocations_endpoint_5m --by service,route --columns calls,p99_us"
    lines += [
        "Ask it:",
        f"    kivi --endpoint {options.listen} {asked}",
        f"    {http}://{page}/ in a browser; in Grafana it is a Prometheus at {http}://{page}",
        "",
    ]
    return "\n".join(lines)
