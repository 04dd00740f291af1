"""Spans that are sent to several nodes of a cluster, at the same time and again, count once on each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from tests.cluster.traffic import newest_of
from tests.conftest import require
from tests.log.natscluster import NatsCluster

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan

from tests.otlp import Recorder, Server, export

pytestmark = pytest.mark.story

DEADLINE_S = 60.0


def send(node: Server, batches: Sequence[Sequence[ReadableSpan]], failures: list[BaseException]) -> None:
    """As an exporter does: again until it has an answer."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        for batch in batches:
            while True:
                with contextlib.suppress(grpc.RpcError):
                    export(node.otlp, batch)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{node.otlp} takes no spans")
                time.sleep(0.1)
    except BaseException as error:
        failures.append(error)


def test_a_span_counts_once_whatever_nodes_it_is_sent_to(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats, contextlib.ExitStack() as stack:
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        nodes = [stack.enter_context(Server(tmp_path / f"node-{i}", *how)) for i in range(3)]
        recorder, failures = Recorder(), list[BaseException]()
        batches = [recorder.spans(40) for _ in range(12)]
        threads = [threading.Thread(target=send, args=(node, batches, failures)) for node in nodes]
        for thread in threads:
            thread.start()
        nodes[1].kill()
        nodes[1].start()
        for thread in threads:
            thread.join()
        assert not failures
        send(nodes[1], batches[:3], failures)  # the window of a node that was killed is that of the others
        last = newest_of(nodes)
        answers = []
        for node in nodes:
            with node.connect() as db, db.snapshot(min_snapshot=last) as snap:
                spans = [(row["trace_id"], row["span_id"]) for row in snap.scan("invocations")]
                calls = sum(row["calls"] for row in snap.scan("invocations_service_5m"))
                answers.append((spans, calls))
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0][0]) == len({*answers[0][0]}) == answers[0][1] == 12 * 40
