"""Who may do what: every call of the service by its descriptor, tables by pattern, tokens that change, and limits."""

from __future__ import annotations

import hmac
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from kivi_server import auth
from kivi_server.auth import Access, Tokens
from kivi_server.otlp.listener import SERVICE as SPANS
from kivi_server.otlp.listener import Listener
from kivi_server.service import _NEEDS
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import kivi
from kivi.wire.frames import split
from kivi.wire.methods import SERVICE, path
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2
from tests.server.rawsession import each_alone, frame
from tests.serverproc import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

ROOT, WRITER, READER = "root-4f1d0c", "writer-9a77b2", "reader-51e0aa"
DASHBOARD, FEEDER = "dashboard-c0ffee", "feeder-77aa01"
LINES = [
    "# comments and empty lines are passed over",
    "",
    f"{ROOT} admin",
    f"{WRITER} writer",
    f"{READER} reader",
    f"{DASHBOARD} reader tables=by_*",
    f"{FEEDER} writer tables=calls,accounts",
]
EVENT = {"endpoint": 1, "ts": 1_767_268_800_000_000}
METHODS = list(service_pb2.DESCRIPTOR.services_by_name["Kivi"].methods)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auth")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    (folder / "tokens").write_text("\n".join(LINES))
    arguments = ["--token-file", str(folder / "tokens"), "--otlp", "localhost:0"]
    with ServerProcess(folder / "data", *arguments) as running:
        with running.connect(access_token=ROOT) as db:
            db.create_table("accounts", key={"id": "int64"}, columns={"name": "string", "n": kivi.sum("int64")})
            db.create_table("counters", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
            db.create_event_table("calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp"})
            db.create_event_table("secrets", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp"})
            db.create_aggregate("by_endpoint", source="calls", group_by=["endpoint"], measures={"n": kivi.count()})
        yield running
        assert not [line for line in running.output for token in (ROOT, WRITER, READER, FEEDER) if token in line]


def call(server: ServerProcess, method: Any, token: str | None, request: Any = None) -> grpc.StatusCode:
    """How one call of the service ends, whatever its kind; with an empty request if none is given."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    message = (request or method.input_type._concrete_class()).SerializeToString()
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(server.endpoint) as channel:
        made = getattr(channel, kind)(path(method.name), lambda data: data, lambda data: data)
        given = iter([message]) if method.client_streaming else message
        try:
            reply = made(given, metadata=metadata, timeout=60)
            if method.server_streaming:
                for _ in reply:
                    pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_the_walk_sees_the_whole_service() -> None:
    assert service_pb2.DESCRIPTOR.services_by_name["Kivi"].full_name == SERVICE
    assert {method.name for method in METHODS} == set(_NEEDS)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_call_works_without_the_right_role(server: ServerProcess, method: Any) -> None:
    for unknown in (None, "nobody", READER[:-1], READER + "x", ""):
        assert call(server, method, unknown) is grpc.StatusCode.UNAUTHENTICATED
    roles = {Access.READ: READER, Access.WRITE: WRITER, Access.ADMIN: ROOT}
    for role, token in roles.items():
        ended = call(server, method, token)
        assert (ended is grpc.StatusCode.PERMISSION_DENIED) == (role < _NEEDS[method.name]), (role, ended)
        assert ended is not grpc.StatusCode.UNAUTHENTICATED


EXPORTS = trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"]


@pytest.mark.parametrize("method", list(EXPORTS.methods), ids=lambda method: method.name)
def test_no_call_for_spans_works_without_the_right_role_and_table(server: ServerProcess, method: Any) -> None:
    assert EXPORTS.full_name == SPANS and {each.name for each in EXPORTS.methods} == set(Listener.NEEDS)
    otlp = next(line for line in server.output if line.startswith("otlp on ")).split()[-1]
    span = {"trace_id": bytes(range(16)), "span_id": bytes(range(8)), "kind": 2, "name": "x"}
    request = method.input_type._concrete_class()
    request.resource_spans.add().scope_spans.add().spans.add(
        **span, start_time_unix_nano=EVENT["ts"] * 1_000, end_time_unix_nano=EVENT["ts"] * 1_000
    )

    def ends(token: str | None) -> grpc.StatusCode:
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
        with grpc.insecure_channel(otlp) as channel:
            try:
                channel.unary_unary(f"/{SPANS}/{method.name}")(
                    request.SerializeToString(), metadata=metadata, timeout=60
                )
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
        return grpc.StatusCode.OK

    for unknown in (None, "nobody", WRITER[:-1], ""):
        assert ends(unknown) is grpc.StatusCode.UNAUTHENTICATED
    for denied in (READER, DASHBOARD, FEEDER):  # the last may write, to other tables
        assert ends(denied) is grpc.StatusCode.PERMISSION_DENIED
    with server.connect(access_token=ROOT) as db, db.snapshot() as snapshot:
        assert snapshot.to_arrow("invocations").num_rows == 0
    assert ends(WRITER) is ends(ROOT) is grpc.StatusCode.OK
    with server.connect(access_token=ROOT) as db, db.snapshot() as snapshot:
        assert snapshot.to_arrow("invocations").num_rows == 1


WRITING: dict[str, Any] = {
    "commit": session_pb2.Commit(token="mine"),
    "outcome": session_pb2.Outcome(token="mine"),
}


ONE: Final = types_pb2.Value(int_value=1)


def answers_of(server: ServerProcess, token: str, *requests: session_pb2.Request) -> list[session_pb2.Response]:
    """One frame of a session, without the client library."""
    with grpc.insecure_channel(server.endpoint) as channel:
        made = channel.stream_stream(path("Exchange"), lambda data: data, lambda data: data)
        replies = made(iter([frame(*requests)]), metadata=(("authorization", f"Bearer {token}"),), timeout=60)
        frames = [session_pb2.ServerFrame.FromString(split(data)[0]) for data in replies]
        return [answer for one in frames for response in one.responses for answer in each_alone(response)]


@pytest.mark.parametrize("body", [field.name for field in session_pb2.Request.DESCRIPTOR.oneofs_by_name["body"].fields])
def test_no_request_of_a_session_writes_without_the_right_role(server: ServerProcess, body: str) -> None:
    """By a reader: every kind of request, plain and with an operation, which writes."""
    for operation in (True, False):
        request = session_pb2.Request(id=1, txn=0 if body == "commit" else 7)
        if body not in ("begin", "commit"):
            request.first.SetInParent()
        field = getattr(request, body)
        field.SetInParent()
        if body in WRITING:
            field.CopyFrom(WRITING[body])
        if operation:
            delta = request.operations.add(kind=session_pb2.Operation.KIND_DELTA, table="accounts", columns=["n"])
            delta.key.add().int_value = 1
            delta.values.add().int_value = 1
        answers = answers_of(server, READER, request)
        assert len(answers) == 1
        if body in WRITING or (operation and body in ("apply", "get", "scan_open")):
            assert answers[0].error.code == grpc.StatusCode.PERMISSION_DENIED.value[0], answers[0]
    with server.connect(access_token=ROOT) as db, db.snapshot() as snapshot:
        assert snapshot.get("accounts", (1,)) is None


def test_a_token_for_some_tables_reads_those_and_no_others(server: ServerProcess) -> None:
    with server.connect(access_token=DASHBOARD) as db:
        assert db.tables() == ["by_endpoint"]
        with db.snapshot() as snapshot:
            found = snapshot.get("by_endpoint", (1,)), list(snapshot.scan("by_endpoint", limit=3))
            assert len(found[1]) == snapshot.to_arrow("by_endpoint").num_rows == (found[0] is not None)
        denied: list[Callable[[Any], Any]] = [
            lambda s: s.get("accounts", (1,)),
            lambda s: s.get("not there", (1,)),  # whether it is there is not told
            lambda s: list(s.scan("calls", limit=3)),
            lambda s: s.to_arrow("calls"),
            lambda s: s.summary("calls", {"n": kivi.count()}),
        ]
        assert db.get("by_endpoint", (1,)) == found[0]
        for read in denied:
            with db.snapshot() as snapshot, pytest.raises(kivi.PermissionDenied):
                read(snapshot)
        for table in ("accounts", "not there"):
            with pytest.raises(kivi.PermissionDenied):
                db.get(table, (1,))
        for call_of in (
            lambda: db.describe("calls"),
            lambda: db.split_points("calls"),
            lambda: db.tail_points("calls"),
        ):
            with pytest.raises(kivi.PermissionDenied):
                call_of()
        with pytest.raises(kivi.PermissionDenied):
            db.append("calls", [EVENT])
    asked = [
        session_pb2.Request(id=i, get=session_pb2.Get(table=table, keys=[types_pb2.Key(values=[ONE])]))
        for i, table in enumerate(("counters", "by_endpoint", "not there", "accounts", "counters"), 1)
    ]
    for one in (asked[:1], asked):  # alone, and one of many
        # A session's answers come as they are ready, in any order.
        refused = sorted(answer.id for answer in answers_of(server, DASHBOARD, *one) if answer.error.reason)
        assert refused == [request.id for request in one if request.get.table != "by_endpoint"]


def test_a_token_for_some_tables_writes_those_and_no_others(server: ServerProcess) -> None:
    with server.connect(access_token=FEEDER) as db:
        db.append("calls", [EVENT])
        with db.transaction() as tx:
            tx.delta("accounts", (5,), n=1)
            tx.append("calls", [EVENT])
        stage = db.stage("calls", [EVENT])
        with db.transaction(batch=("spark/calls/app", 0)) as tx:
            tx.append_stages("calls", [stage])
        with server.connect(access_token=ROOT) as root, root.transaction(batch=("spark/secrets/app", 0)):
            pass
        assert db.batch_scopes("spark/") == ["spark/calls/app"]
        refused: list[Callable[[Any], Any]] = [
            lambda tx: tx.append("secrets", [EVENT]),
            lambda tx: tx.delta("by_endpoint", (1,), n=1),
            lambda tx: tx.overwrite("secrets"),
            lambda tx: tx.guard("secrets", (1,)),
        ]
        for write in refused:
            with pytest.raises((kivi.PermissionDenied, kivi.InvalidArgument, kivi.SchemaError)), db.transaction() as tx:
                write(tx)
        for call_of in (lambda: db.append("secrets", [EVENT]), lambda: db.stage("secrets", [EVENT])):
            with pytest.raises(kivi.PermissionDenied):
                call_of()
    with server.connect(access_token=ROOT) as db, db.snapshot() as snapshot:
        assert snapshot.to_arrow("secrets").num_rows == 0
        assert snapshot.to_arrow("calls").num_rows == 3


def test_how_an_answer_was_made_names_only_tables_that_the_token_may_see(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{ROOT} admin\n{FEEDER} reader tables=calls,open_*\n")
    tokens = ["--token-file", str(tmp_path / "tokens")]
    asked = {"group_by": ["app"], "measures": {"n": kivi.count()}}
    with ServerProcess(tmp_path / "data", *tokens) as server, server.connect(access_token=ROOT) as db:
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "app": "string"})
        db.append("calls", [{"ts": i, "app": f"a{i % 3}"} for i in range(300)])
        for name in ("secret_by_app", "open_by_app"):
            db.create_aggregate(name, source="calls", group_by=["app"], measures={"n": kivi.count()})
            with server.connect(access_token=FEEDER) as narrow, db.snapshot() as all_of_it, narrow.snapshot() as some:
                full, shown = (snap.query("calls", **asked) for snap in (all_of_it, some))
                assert list(full) == list(shown)
                assert full.explain().count(f"rows of {name}") == 2
                if name == "open_by_app":
                    assert shown.explain().count(f"rows of {name}") == 2
                else:
                    assert "secret" not in shown.explain() and shown.explain().count("rows of an aggregate") == 2
            db.drop(name)


def test_a_role_is_not_enough_for_what_concerns_the_whole_store(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{ROOT} admin tables=a*\n")
    with (
        ServerProcess(tmp_path / "data", "--token-file", str(tmp_path / "tokens")) as server,
        server.connect(access_token=ROOT) as db,
    ):
        db.create_table("accounts", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        for call_of in (
            lambda: db.create_table("b", key={"id": "int64"}, columns={"n": "int64"}),
            lambda: db.drop("b"),
            db.consolidate,
            lambda: db.checkpoint(str(tmp_path / "copy")),
            lambda: db.create_event_table(
                "a", event_time="ts", columns={"ts": "timestamp"}, local="1d", cold=f"file://{tmp_path}/cold"
            ),
        ):
            with pytest.raises(kivi.PermissionDenied):
                call_of()
        db.drop("accounts")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no token"),
        (["token boss"], "line 1"),
        (["# x", "secret-token reader table=a"], "line 2"),
        (["secret-token reader rate=fast"], "rate="),
        (["secret-token reader rate=0"], "rate="),
        (["secret-token reader tables="], "tables="),
        (["secret-token reader staged=1XB"], "staged="),
        (["secret-token reader", "secret-token admin"], "line 2"),
        (["secret-token reader rows=customer:a rows=region:b"], "rows= is there twice"),
        (["secret-token reader tables=a rate=3 tables=b"], "tables= is there twice"),
    ],
)
def test_a_file_with_a_fault_is_refused_and_its_tokens_are_not_told(lines: list[str], words: str) -> None:
    with pytest.raises(kivi.InvalidArgument) as error:
        Tokens(lines)
    assert words in str(error.value) and "secret-token" not in str(error.value)


def test_every_token_is_compared_in_constant_time_whichever_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``hmac.compare_digest``, all of them each time, as digests of one length."""
    compared: list[tuple[int, int]] = []

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(auth, "hmac", types.SimpleNamespace(compare_digest=counted))
    tokens = Tokens(LINES)
    for sent in (ROOT, FEEDER, "x", "x" * 10_000):
        compared.clear()
        if sent in (ROOT, FEEDER):
            tokens.of_header(f"Bearer {sent}")
        else:
            with pytest.raises(kivi.Unauthenticated):
                tokens.of_header(f"Bearer {sent}")
        assert compared == [(32, 32)] * 5


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ROOT} admin\n{READER} reader\n")

    with ServerProcess(tmp_path / "data", "--token-file", str(tokens)) as server:
        with server.connect(access_token=ROOT) as db:
            db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with server.connect(access_token=READER, timeout=60) as session:

            def reads() -> bool:
                try:
                    with session.snapshot() as snapshot:
                        snapshot.get("t", (1,))
                except (kivi.Unauthenticated, kivi.Unavailable):
                    return False
                return True

            def writes() -> bool:
                try:
                    with session.transaction() as tx:
                        tx.delta("t", (1,), n=1)
                except (kivi.PermissionDenied, kivi.Unauthenticated, kivi.Unavailable):
                    return False
                return True

            assert reads() and not writes()
            tokens.write_text("a fault in the file\n")
            wait_until(lambda: "the tokens stay as they were" in "".join(server.output))
            assert reads() and not writes()
            tokens.write_text(f"{ROOT} admin\n{READER} writer\n{FEEDER} reader\n")
            wait_until(writes, pause_s=0.1)  # the open session goes on with what its token may do now
            with server.connect(access_token=FEEDER) as other:
                assert other.tables() == ["t"]
            tokens.write_text(f"{ROOT} admin\n")
            wait_until(lambda: not reads(), pause_s=0.1)  # and ends with it
            for _ in range(2):
                with pytest.raises(kivi.Unauthenticated):
                    session.get("t", (1,))
            with pytest.raises(kivi.Unauthenticated):
                server.connect(access_token=READER)
        said = "".join(server.output)
        assert "the tokens stay as they were" in said and "read again" in said
        assert not [token for token in (ROOT, READER, FEEDER, "a fault in the file") if token in said]


# -- limits ----------------------------------------------------------------------------------------------


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[ServerProcess]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ROOT} admin\n{READER} reader rate=50 snapshots=3\n{WRITER} writer staged=100KiB\n")
    with ServerProcess(tmp_path / "data", "--token-file", str(tokens)) as server:
        with server.connect(access_token=ROOT) as db:
            db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
            db.create_event_table("calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp"})
        yield server


def test_a_client_beyond_its_rate_is_refused_and_nobody_else(limited: ServerProcess) -> None:
    with limited.connect(access_token=READER) as hasty, limited.connect(access_token=ROOT) as calm:
        refused = served = 0
        began = time.monotonic()
        while (lasted_s := time.monotonic() - began) < 2 or (not refused and lasted_s < PATIENCE_S):
            for _ in range(10):
                try:
                    with hasty.snapshot() as snapshot:
                        snapshot.get("t", (1,))
                    served += 1
                except kivi.ResourceExhausted as error:
                    refused += error.details["limit"] == "client_rate"
            with calm.transaction() as tx:
                tx.delta("t", (1,), n=1)
        assert refused > 0
        assert 50 <= served <= 50 * (lasted_s + 1) + 10
        time.sleep(1.1)
        with hasty.snapshot() as snapshot:
            assert snapshot.get("t", (1,)) is not None


def test_writes_that_were_refused_are_not_left_out_of_a_commit(tmp_path: Path) -> None:
    """Nor does a commit that was refused leave its transaction open."""
    tokens = tmp_path / "tokens"

    def allow(more: str) -> None:
        tokens.write_text(f"{ROOT} admin\n{WRITER} writer {more}\n{FEEDER} writer tables=t\n")

    allow("")
    with ServerProcess(tmp_path / "data", "--token-file", str(tokens)) as server, server.connect(
        access_token=ROOT
    ) as root, server.connect(access_token=WRITER) as db, server.connect(access_token=FEEDER) as feeder:  # fmt: skip
        for name in ("t", "secret"):
            root.create_table(name, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        db.get("t", (9,))  # from here on it knows the table, and asks for nothing but what it is told to

        def is_refused() -> bool:
            try:
                db.get("t", (9,))
            except kivi.ResourceExhausted:
                return True
            return False

        def begun() -> Any:
            """A transaction with a write that waits to travel, and no request left for a quarter of an hour."""
            tx = db.transaction()
            tx.get("t", (9,))
            tx.delta("t", (1,), n=1)
            allow("rate=0.001")
            wait_until(is_refused)
            return tx

        def go_on() -> None:
            allow("")
            wait_until(lambda: not is_refused())

        tx = begun()
        with pytest.raises(kivi.ResourceExhausted):
            tx.get("t", (2,))  # which carries the write
        go_on()
        with pytest.raises(kivi.ResourceExhausted):
            tx.commit()
        tx = begun()
        with pytest.raises(kivi.ResourceExhausted):
            tx.commit()
        go_on()
        root.get("secret", (1,))
        feeder._transport.core.schemas |= root._transport.core.schemas  # as if its token had been for this table once
        tx = feeder.transaction()
        tx.delta("t", (1,), n=1)
        tx.delta("secret", (1,), n=1)
        with pytest.raises(kivi.PermissionDenied):
            tx.get("t", (2,))
        with pytest.raises(kivi.PermissionDenied):
            tx.commit()
        assert root.get("t", (1,)) is None
        wait_until(lambda: root.stats()["leases"] == 0 and root.stats()["server_open_transactions"] == 0)


def _reads(db: Any) -> bool:
    try:
        with db.snapshot() as snapshot:
            return snapshot.get("t", (1,)) is None
    except kivi.ResourceExhausted:
        return False


def test_a_client_has_so_many_snapshots_over_all_its_connections(limited: ServerProcess) -> None:
    with limited.connect(access_token=ROOT) as root:
        wait_until(lambda: not root.stats()["server_open_transactions"])  # nobody waits for a release, nor did the last
    with limited.connect(access_token=READER) as one, limited.connect(access_token=READER) as two:
        held = [one.snapshot(), one.snapshot(shared=True), two.snapshot()]
        for snapshot in held:
            snapshot.__enter__()
            snapshot.get("t", (1,))
        for db in (one, two):
            with pytest.raises(kivi.ResourceExhausted) as error, db.snapshot() as snapshot:
                snapshot.get("t", (1,))
            assert error.value.details["limit"] == "client_snapshots"
        held[0].close()
        wait_until(lambda: _reads(two))  # a release is not waited for
        for snapshot in held[1:]:
            snapshot.close()


def test_a_client_has_so_much_staged_until_it_commits(limited: ServerProcess) -> None:
    events = [{"endpoint": i, "ts": 1_767_268_800_000_000 + i} for i in range(3_000)]  # 48 kB
    with limited.connect(access_token=WRITER) as db, limited.connect(access_token=ROOT) as other:
        stages = [db.stage("calls", events), db.stage("calls", events)]
        with pytest.raises(kivi.ResourceExhausted) as error:
            db.stage("calls", events)
        assert error.value.details["limit"] == "client_staged"
        other.stage("calls", events)
        with db.transaction() as tx:
            tx.append_stages("calls", stages)
        db.stage("calls", events)


def test_without_tokens_a_connection_is_a_client(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", "--client-snapshots", "1") as server,
        server.connect() as one,
        server.connect() as two,
    ):
        one.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        for db in (one, two):
            with db.snapshot() as held:
                held.get("t", (1,))
                with pytest.raises(kivi.ResourceExhausted), db.snapshot() as more:
                    more.get("t", (1,))
