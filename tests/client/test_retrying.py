"""Pauses between attempts: they grow, they are bounded, and they end with the time."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kivi import CommitUnknown, NotFound, PermissionDenied, ResourceExhausted, Retryable, Unauthenticated, errors
from kivi.api.retry import Retries, backoff_s
from kivi.client.core import _REPEATABLE, Core
from kivi.client.steps import ConnectionLost, Sleep, Timeout
from kivi.wire.status import from_rpc_error
from kivi.wire.v1 import service_pb2, session_pb2

AGAIN = Retryable("again")


def test_pauses_grow_to_a_quarter_of_a_second_and_no_further():
    assert 0.0005 <= backoff_s(0) <= 0.001
    assert all(0.125 <= backoff_s(attempt) <= 0.25 for attempt in (8, 100, 1024, 10**6))  # 2.0**1024 is no float


def test_without_a_timeout_there_is_always_another():
    retries = Retries(None)
    assert all(retries.pause_s(AGAIN) for _ in range(2_000))


def test_a_pause_that_would_end_too_late_is_not_given():
    assert Retries(0.0).pause_s(AGAIN) is None
    retries = Retries(0.2)  # attempts that take no time: the pauses alone outgrow it
    assert any(retries.pause_s(AGAIN) is None for _ in range(20))


def test_a_table_of_another_generation_is_looked_up_anew_once():
    retries = Retries(10.0)
    assert retries.pause_s(NotFound("no such table")) is None
    assert retries.pause_s(NotFound("another generation", stale=True)) == 0.0
    assert retries.pause_s(NotFound("another generation", stale=True)) is None


def test_a_call_that_broke_in_grpc_itself_is_a_lost_connection() -> None:
    """Seen once in many runs: a session's connection is lost, and asyncio's gRPC calls it INTERNAL."""
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "Internal error from Core")
    assert type(from_rpc_error(broken)) is errors.Unavailable
    fault = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "something else")
    assert type(from_rpc_error(fault)) is errors.KiviError


def answered(steps: Any, *answers: Any) -> Any:
    """What these steps come to, where each effect that waits for a server is answered, or fails, in turn."""
    left, given = list(answers), None
    try:
        effect = next(steps)
        while True:
            given = None if isinstance(effect, Sleep) else left.pop(0)
            effect = steps.throw(given) if isinstance(given, BaseException) else steps.send(given)
    except StopIteration as end:
        assert not left
        return end.value


REFUSALS = [
    ResourceExhausted("too many requests", limit="client_rate"),
    Unauthenticated("who?"),
    PermissionDenied("no"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("lost", [ConnectionLost("gone", sent=True), Timeout("late")], ids=["lost", "late"])
def test_r16_a_commit_that_may_have_been_sent_is_not_told_as_refused(refusal: Exception, lost: Exception) -> None:
    core, commit = Core("h:1", 10.0), session_pb2.Request(commit=session_pb2.Commit(token="t"))
    unknown = lambda: CommitUnknown(token="t")  # noqa: E731
    with pytest.raises(CommitUnknown):
        answered(core.repeat(commit, unknown), lost, refusal)
    with pytest.raises(type(refusal)):  # nothing of it was sent
        answered(core.repeat(commit, unknown), ConnectionLost("gone", sent=False), refusal)
    with pytest.raises(type(refusal)):
        answered(core.repeat(commit, unknown), refusal)
    with pytest.raises(type(refusal)):  # a read has nothing to be unsure of
        answered(core.repeat(session_pb2.Request(get=session_pb2.Get()), unknown), lost, refusal)
    with pytest.raises(CommitUnknown):
        answered(core.resolve("t", core.deadline()), refusal)


def test_every_call_is_known_to_be_repeatable_or_not() -> None:
    """A new one is not repeated before somebody has said that it may be."""
    once = {
        "AlterAggregate", "AlterTable", "Backup", "CancelMove", "Checkpoint", "Consolidate", "CreateAggregate",
        "CreateAggregates", "CreateAlert", "CreateRule", "CreateTable", "CreateView", "DropAlert", "DropRule",
        "DropSubscription",
        "DropTable", "MoveShards", "RebalanceShards", "SilenceAlert",
        "ForgetNode",
        "VerifyCluster",
    }  # fmt: skip
    streams = {"Exchange", "Stage", "Subscribe"}
    known = {method.name for method in service_pb2.DESCRIPTOR.services_by_name["Kivi"].methods}
    assert known >= _REPEATABLE and not _REPEATABLE & once
    assert known - _REPEATABLE - once <= streams, known - _REPEATABLE - once
