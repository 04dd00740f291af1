"""Event blocks against a plain list: every cut, whatever was sealed, merged, forgotten or lost in a crash meanwhile."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kivi.arrow.columns import TIMESTAMP, stored_column, stored_rows
from kivi.arrow.records import event_batch
from kivi.encoding.event_names import STAMP, EventNames
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, event_data_key, event_header_key, event_meta_key, table_prefix
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import RocksEngine
from kivi.errors import DataLoss, InvalidArgument, SnapshotTooOld
from kivi.events.compaction import mergeable
from kivi.events.manifest import settled_files
from kivi.events.rewriting import Wanted, rewrite
from kivi.events.store import EventStore, destroy
from kivi.events.summing import Sums
from kivi.model.changes import COMMIT_TS
from kivi.model.declarations import event_table_schema
from kivi.model.expressions import bind, col, matches, within_km
from kivi.model.schema import Measure, TableSchema
from kivi.model.types import ColumnType
from tests.seeds import seeds

TABLE = TableSchema(
    **{
        **{
            name: getattr(
                event_table_schema(
                    "calls", "ts", {"ts": "timestamp", "n": "int64", "d": "decimal(9,2)", "f": "float64", "s": "string"}
                ),
                name,
            )
            for name in ("name", "kind", "key", "columns", "event_time")
        },
        "id": 7,
    }
)
TYPES = {c.name: c.type for c in TABLE.columns}


@pytest.fixture(params=["memory", "rocks"])
def engine(request, tmp_path):
    made = MemoryEngine() if request.param == "memory" else RocksEngine(str(tmp_path / "engine"))
    yield made
    made.close()


def rows_of(cts, count, time=None):
    """Events that say which commit and row they are."""
    return [
        {
            "ts": (cts if time is None else time) * 1000 + i,
            "n": None if i % 5 == 4 else cts * 1000 + i,
            "d": cts * 100 + i,
            "f": i / 2,
            "s": f"{cts}/{i}",
        }
        for i in range(count)
    ]


def part_of(cts: int, batch: Any) -> tuple[Any, Any, Any]:
    return np.array([cts], np.uint64), np.array([batch.num_rows], np.int64), batch


def batch_of(rows):
    return event_batch(TABLE, pa.Table.from_pylist(rows).cast(_CASTS) if rows else [])


_CASTS = pa.schema([("ts", pa.int64()), ("n", pa.int64()), ("d", pa.int64()), ("f", pa.float64()), ("s", pa.string())])


def seal(events, parts, upto):
    batch = WriteBatch()
    events.seal(batch, [part_of(cts, batch_of(rows)) for cts, rows in parts], upto)
    if len(batch):
        events._engine.write(batch)


def floor(events, cts, time_us):
    batch = WriteBatch()
    events.set_floor(batch, cts, time_us)
    if len(batch):
        events._engine.write(batch)


def settle(events, max_rows=1 << 20):
    while events.compact(max_rows):
        pass


def names_of(batches):
    return [row["s"] for batch in batches for row in stored_rows(batch)]


def stored_ids(engine):
    """Data ids in the engine."""
    prefix = table_prefix(Space.EVENT_DATA, TABLE.id)
    return {int.from_bytes(key[len(prefix) :], "big") for key, _ in engine.scan(prefix, prefix_end(prefix))}


def filled(engine, commits, **options):
    """A store with ``commits`` (cts, rows), each sealed on its own."""
    events = EventStore(engine, TABLE, **options)
    for cts, count in commits:
        seal(events, [(cts, rows_of(cts, count))], cts)
    return events


def scanned(events, upto, **options):
    """A scan of a view that is taken now, and closed when the iterator ends or is dropped."""

    def batches(view):
        with view:
            yield from view.scan(**options)

    return batches(events.view(upto))


def summed(view, **options):
    counts = [Measure("rows", "count", None), Measure("counted", "count", "n")]
    sums = Sums(TABLE, [*counts, Measure("n", "sum", "n"), Measure("d", "sum", "d")])
    view.sum_up(sums, **options)
    return sums.row()


def totals(rows):
    """``summed`` of a list of events."""
    return {
        "rows": len(rows),
        "counted": sum(row["n"] is not None for row in rows),
        "n": sum(row["n"] or 0 for row in rows),
        "d": sum(row["d"] * 100 for row in rows),
    }


# -- reading ----------------------------------------------------------------------------------------


def test_what_was_sealed_is_read_back(engine):
    events = EventStore(engine, TABLE)
    assert list(scanned(events, 10)) == []
    rows = rows_of(3, 5) + rows_of(4, 2)
    seal(events, [(3, rows_of(3, 5)), (4, rows_of(4, 2))], 9)
    assert events.events_upto == 9
    with events.view(100) as view:
        assert (view.events_upto, view.rows, view.floor_us) == (9, 7, None)
        (batch,) = view.scan()
        # decimals and timestamps come back in the table's own types
        assert batch.schema == batch_of(rows).schema
        assert batch.schema.metadata is None
        assert batch.to_pylist() == batch_of([{**row, "d": row["d"]} for row in rows]).to_pylist()


def test_a_cut_inside_a_block(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(cts, rows_of(cts, 3)) for cts in (2, 4, 6)], 6)
    every = [f"{cts}/{i}" for cts in (2, 4, 6) for i in range(3)]
    for upto in range(8):
        for after in range(8):
            expected = [name for name in every if after < int(name[0]) <= upto]
            assert names_of(scanned(events, upto, after=after)) == expected
            assert names_of(scanned(events, upto, after=after, reverse=True)) == expected[::-1]
    assert names_of(scanned(events, 2**64 - 1)) == every


def test_a_block_of_many_commits_keeps_its_header_small(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(cts, rows_of(cts, 1)) for cts in range(1, 1001)], 1000)
    (header,) = engine.get_many([event_header_key(TABLE.id, 1)])
    assert len(header) < 1_000
    for upto in (0, 1, 2, 499, 999, 1000):
        with events.view(upto) as view:
            assert view.rows == upto
            assert names_of(view.scan()) == [f"{cts}/0" for cts in range(1, upto + 1)]
    stamps = [
        s
        for b in scanned(events, 600, after=590, with_cts=True, columns=["n"])
        for s in b.column(COMMIT_TS).to_pylist()
    ]
    assert stamps == list(range(591, 601))


def test_a_commit_of_several_blocks(engine):
    events = EventStore(engine, TABLE, block_rows=4)
    seal(events, [(5, rows_of(5, 10)), (6, rows_of(6, 1))], 6)
    with events.view(6) as view:
        assert [block.rows for block in view.blocks] == [4, 4, 3]
        assert [block.runs for block in view.blocks] == [((5, 4),), ((5, 4),), ((5, 2), (6, 1))]
    assert len(names_of(scanned(events, 5))) == 10
    assert names_of(scanned(events, 6, after=5)) == ["6/0"]


def test_blocks_are_bounded_in_bytes(engine):
    events = EventStore(engine, TABLE, block_bytes=10_000)
    rows = [{**row, "s": "x" * 1000} for row in rows_of(1, 100)]
    seal(events, [(1, rows)], 1)
    with events.view(1) as view:
        assert all(block.raw_bytes <= 11_000 for block in view.blocks)
        assert view.rows == 100


def test_columns_and_cts(engine):
    events = filled(engine, [(1, 3), (2, 3)])
    batches = list(scanned(events, 2, columns=["s", "n"], with_cts=True))
    assert [b.schema.names for b in batches] == [["s", "n", COMMIT_TS]] * 2
    assert batches[0].schema.field(COMMIT_TS).type == pa.int64()
    assert [c for b in batches for c in b.column(COMMIT_TS).to_pylist()] == [1, 1, 1, 2, 2, 2]
    assert names_of(scanned(events, 2, reverse=True))[:2] == ["2/2", "2/1"]
    assert sum(b.num_rows for b in scanned(events, 2, columns=[])) == 6


def test_batches_are_bounded(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(1, rows_of(1, 100_000))], 1)
    assert [b.num_rows for b in scanned(events, 1)] == [65_536, 34_464]


def counting(engine, monkeypatch):
    """Counts how many blocks are fetched."""
    fetched = []
    real = engine.get

    def get(key):
        if key[0] == Space.EVENT_DATA:
            fetched.append(key)
        return real(key)

    monkeypatch.setattr(engine, "get", get)
    return fetched


def test_headers_prune(monkeypatch):
    engine = MemoryEngine()
    events = filled(engine, [(cts, 10) for cts in range(1, 11)])
    fetched = counting(engine, monkeypatch)

    def blocks(**options):
        fetched.clear()
        list(scanned(events, options.pop("upto", 10), **options))
        return len(fetched)

    def where(predicate):
        return blocks(where=bind(predicate, lambda name: TYPES[name]))

    assert blocks() == 10
    assert blocks(upto=3) == 3
    assert blocks(after=3) == 7
    assert blocks(time_from=5000) == 6
    assert blocks(time_to=5000) == 4
    assert blocks(time_from=5000, time_to=5001) == 1
    assert where(col("n") == 5001) == 1
    assert where((col("n") >= 3000) & (col("n") < 4000)) == 1
    assert where((col("n") == 1001) | (col("d") == 200)) == 2
    assert where(col("n").isin([1001, 9001])) == 2
    assert where(col("n").isin([])) == 0
    assert where(col("f") > 4.5) == 0
    assert where(~(col("n") == 1)) == 10
    assert where(col("s") == "1/1") == 10
    assert where(col("ts").is_null()) == 0


def test_all_null_columns_prune_and_do_not_fail(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(1, [{**row, "n": None} for row in rows_of(1, 3)])], 1)
    for predicate, expected in ((col("n") == 1, 0), (col("n") != 1, 0), (col("n").is_null(), 3), (col("n") > 0, 0)):
        assert len(names_of(scanned(events, 1, where=bind(predicate, lambda name: TYPES[name])))) == expected


def test_predicates_and_time_ranges_as_rows_would(engine):
    rng = random.Random(3)
    events = EventStore(engine, TABLE, block_rows=8)
    every = []
    for cts in range(1, 30):
        rows = rows_of(cts, rng.randrange(1, 6), rng.randrange(1, 30))
        every += rows
        seal(events, [(cts, rows)], cts)
        events.compact(16)
    for _ in range(200):
        predicate = bind(
            rng.choice(
                [
                    col("n") >= rng.randrange(30_000),
                    col("d") < rng.randrange(30),
                    col("n") != 3,
                    col("n").is_null(),
                    col("s").startswith(str(rng.randrange(4))),
                    within_km("f", "d", rng.randrange(3), rng.randrange(20), 500),
                ]
            )
            & rng.choice([~(col("f") == 0.5), col("s") != "7/0", col("n").isin([5000, 6001]) | (col("f") >= 1)]),
            lambda name: TYPES[name],
        )
        low, high = rng.choice([None, rng.randrange(30_000)]), rng.choice([None, rng.randrange(30_000)])
        expected = [
            row["s"]
            for row in every
            if (low is None or row["ts"] >= low)
            and (high is None or row["ts"] < high)
            and matches(predicate, {**row, "d": row["d"] * 100})
        ]
        assert names_of(scanned(events, 99, time_from=low, time_to=high, where=predicate, columns=["s"])) == expected


# -- sealing ----------------------------------------------------------------------------------------


def test_replay_changes_nothing(engine):
    events = EventStore(engine, TABLE)
    parts = [(cts, rows_of(cts, 2)) for cts in (1, 2, 3)]
    seal(events, parts, 3)
    for upto in (1, 2, 3):
        batch = WriteBatch()
        events.seal(batch, [part_of(cts, batch_of(rows)) for cts, rows in parts[:upto]], upto)
        assert not len(batch)
    seal(events, [*parts, (4, rows_of(4, 2))], 5)
    assert names_of(scanned(events, 9)) == [f"{cts}/{i}" for cts in (1, 2, 3, 4) for i in range(2)]
    assert EventStore(engine, TABLE).events_upto == 5


def test_parts_out_of_order_are_refused(engine):
    events = EventStore(engine, TABLE)
    for stamps, upto in (([2, 1], 2), ([3], 2)):
        with pytest.raises(InvalidArgument, match="commit order"):
            seal(events, [(cts, rows_of(cts, 1)) for cts in stamps], upto)


def test_events_upto_moves_without_events(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(4, [])], 8)
    assert events.events_upto == 8
    assert list(scanned(events, 8)) == []


# -- compaction -------------------------------------------------------------------------------------


def test_compaction_changes_no_answer_and_leaves_nothing_behind(engine):
    events = filled(engine, [(cts, 1 + cts % 4) for cts in range(1, 101)])
    before = {upto: names_of(scanned(events, upto, after=upto // 3)) for upto in range(0, 101, 7)}
    settle(events)
    with events.view(100) as view:
        assert len(view.blocks) < 24
        live = {block.data for block in view.blocks}
    for upto, expected in before.items():
        assert names_of(scanned(events, upto, after=upto // 3)) == expected
    events.compact(1 << 20)
    assert stored_ids(engine) == live


def test_an_open_view_keeps_what_it_reads(engine):
    events = filled(engine, [(cts, 2) for cts in range(1, 9)])
    view = events.view(8)
    scan = scanned(events, 5)
    first = next(scan)
    settle(events)
    assert len(stored_ids(engine)) == 9
    assert names_of([first, *scan]) == [f"{cts}/{i}" for cts in range(1, 6) for i in range(2)]
    events.compact(1 << 20)
    assert len(stored_ids(engine)) == 9
    later = events.view(8)
    assert names_of(view.scan()) == names_of(later.scan())
    view.close()
    view.close()
    with pytest.raises(InvalidArgument, match="closed"):
        list(view.scan())
    events.compact(1 << 20)
    assert len(stored_ids(engine)) == 1
    assert len(names_of(later.scan())) == 16
    later.close()
    assert events.open_views == 0


def test_a_view_that_nobody_closes_is_closed_by_the_collector():
    events = filled(MemoryEngine(), [(1, 1)])
    view = events.view(1)
    dropped = scanned(events, 1)
    assert events.open_views == 2
    with events._readers._lock:  # the collector may run inside the lock, and must not wait for it
        del view, dropped
        gc.collect()
    assert events.open_views == 0


def test_an_event_is_rewritten_about_once_per_tier():
    engine = MemoryEngine()
    events = EventStore(engine, TABLE, block_rows=1 << 16)
    sealed = written = 0
    real = engine.write

    def write(batch):
        nonlocal written
        headers = [value for key, value in batch if key[0] == Space.EVENT and len(key) > 6 and value is not None]
        written += sum(int(header.split(b'"rows":')[1].split(b",")[0]) for header in headers)
        real(batch)

    engine.write = write  # type: ignore[method-assign]
    for cts in range(1, 801):
        seal(events, [(cts, rows_of(cts, 10))], cts)
        sealed += 10
        events.compact(1 << 16)
    with events.view(800) as view:
        assert len(view.blocks) <= 4 * 7
        assert view.rows == sealed
    assert written / sealed < 5  # once sealed, then the tiers 10, 80, 640 and 5,120


@pytest.mark.parametrize("seed", seeds(0, night=20))
def test_compaction_looks_at_few_headers_and_does_what_it_would_with_all_of_them(seed):
    random_, looked = random.Random(seed), []
    kept, anew = MemoryEngine(), MemoryEngine()
    events = EventStore(kept, TABLE)
    since = events._base.headers_since

    def headers_since(order):
        looked.append(len(blocks := since(order)))
        return blocks

    events._base.headers_since = headers_since  # type: ignore[method-assign]
    max_rows = 64
    for cts in range(1, 300):
        rows = rows_of(cts, random_.choice([1, 3, 10, 33, 64]))
        seal(events, [(cts, rows)], cts)
        seal(EventStore(anew, TABLE), [(cts, rows)], cts)
        for _ in range(random_.randrange(8)):
            events.compact(max_rows)
            EventStore(anew, TABLE).compact(max_rows)  # which remembers nothing, and looks at all
        if cts == 150:
            max_rows = 128
    settle(events, max_rows)
    settle(EventStore(anew, TABLE), max_rows)
    with events.view(300) as view, EventStore(anew, TABLE).view(300) as other:
        assert [(b.order, b.rows, b.last_cts) for b in view.blocks] == [
            (b.order, b.rows, b.last_cts) for b in other.blocks
        ]
        assert len(view.blocks) > 40
    events.compact(max_rows)
    assert looked[-1] < 20  # the last full one, and what is not enough yet of each tier


class _Fake:
    def __init__(self, rows):
        self.rows, self.raw_bytes = rows, rows * 10


@pytest.mark.parametrize("seed", range(20))
def test_choosing_what_to_merge_ends_and_is_bounded(seed):
    rng = random.Random(seed)
    blocks: list[Any] = []
    rewritten = total = 0
    for _ in range(300):
        rows = rng.choice([1, 3, 10, 50, 400, 900])
        total += rows
        blocks.append(_Fake(rows))
        for _ in range(rng.choice([0, 1, 100])):
            inputs = mergeable(blocks, 1000, 1 << 30)
            if not inputs:
                break
            assert 2 <= len(inputs) <= 8
            assert sum(b.rows for b in inputs) <= 1000
            at = blocks.index(inputs[0])
            assert blocks[at : at + len(inputs)] == inputs
            blocks[at : at + len(inputs)] = [_Fake(sum(b.rows for b in inputs))]
            rewritten += blocks[at].rows
    while inputs := mergeable(blocks, 1000, 1 << 30):
        at = blocks.index(inputs[0])
        blocks[at : at + len(inputs)] = [_Fake(sum(b.rows for b in inputs))]
    assert rewritten / total < 4
    assert len(blocks) <= 2 * total // 500 + 30


def test_scans_beside_a_writer_that_seals_and_merges(engine):
    events = EventStore(engine, TABLE, block_rows=64)
    commits = 150
    failures: list[BaseException] = []
    done = threading.Event()

    def write():
        try:
            for cts in range(1, commits + 1):
                seal(events, [(cts, rows_of(cts, 5))], cts)
                events.compact(64)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    def read(seed):
        rng = random.Random(seed)
        try:
            while not done.is_set():
                with events.view(rng.randrange(commits + 20)) as view:
                    upto = min(view.upto, view.events_upto)
                    reverse = rng.random() < 0.5
                    found = names_of(view.scan(columns=["s"], reverse=reverse))
                    expected = [f"{cts}/{i}" for cts in range(1, upto + 1) for i in range(5)]
                    assert found == (expected[::-1] if reverse else expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(s,)) for s in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    settle(events, 64)
    events.compact(64)
    with events.view(commits) as view:
        assert stored_ids(engine) == {block.data for block in view.blocks}


# -- crashes and damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", range(40))
def test_a_crash_between_any_two_batches(keep):
    engine = MemoryEngine()
    events = EventStore(engine, TABLE)
    parts = [(cts, rows_of(cts, 2)) for cts in range(1, 17)]
    for cts, rows in parts:
        seal(events, [(cts, rows)], cts)
        events.compact(1 << 20)
    settle(events)
    engine.crash(keep)
    events = EventStore(engine, TABLE)
    events._delete_dead()
    with events.view(99) as view:
        assert stored_ids(engine) == {block.data for block in view.blocks}
    for cts, rows in parts:
        seal(events, [(cts, rows)], cts)
    settle(events)
    assert names_of(scanned(events, 99)) == [f"{cts}/{i}" for cts in range(1, 17) for i in range(2)]
    assert names_of(scanned(events, 7)) == [f"{cts}/{i}" for cts in range(1, 8) for i in range(2)]


class _Asked:
    """How many data there were each time that the engine was asked to give back what others had taken."""

    def __init__(self, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = list[int]()
        monkeypatch.setattr(engine, "give_back", lambda start, end: self.data.append(len(stored_ids(engine))))


class _Eager:
    """A lock for which somebody waits who then deletes what there is to delete."""

    def __init__(self, events: EventStore) -> None:
        self.events = events

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.events._delete_dead()


def _rewritten(events: EventStore, engine: MemoryEngine, lock: Any) -> None:
    with events.everything(8) as view:
        batches = [*view.scan(naming=(STAMP,))]
    rewrite(events, engine, lambda: Wanted(batches, 8), lock=lock)


def test_what_was_rewritten_is_given_back_though_it_is_deleted_as_soon_as_the_lock_is_free(monkeypatch):
    engine = MemoryEngine()
    events = filled(engine, [(cts, 2) for cts in range(1, 9)])
    asked, events._owed = _Asked(engine, monkeypatch), False
    _rewritten(events, engine, _Eager(events))
    assert asked.data == [1]


def test_what_was_rewritten_is_given_back_when_the_last_view_of_it_has_closed(monkeypatch):
    engine = MemoryEngine()
    events = filled(engine, [(cts, 2) for cts in range(1, 9)])
    assert events.compact(1 << 20)
    view, asked = events.view(8), _Asked(engine, monkeypatch)
    _rewritten(events, engine, nullcontext())
    assert events._delete_dead(), "what was merged before the view"
    assert not asked.data
    view.close()
    assert events._delete_dead()
    assert asked.data == [1]


def test_what_was_rewritten_is_given_back_after_a_crash(monkeypatch):
    engine = MemoryEngine()
    events = filled(engine, [(cts, 2) for cts in range(1, 9)])
    _rewritten(events, engine, nullcontext())
    engine.flush()
    engine.crash()
    events, asked = EventStore(engine, TABLE), _Asked(engine, monkeypatch)
    assert events._delete_dead() == 8
    assert asked.data == [1]


class _Interrupting:
    """Stands for some methods, and raises at the ``at``-th call of any, or right after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, after: bool, *methods: tuple[Any, str]) -> None:
        self.left, self.after = at, after
        for owner, name in methods:
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, method: Any) -> Any:
        def called(*args: Any) -> Any:
            self.left -= 1
            if not self.left and not self.after:
                raise KeyboardInterrupt
            result = method(*args)
            if not self.left:
                raise KeyboardInterrupt
            return result

        return called


@pytest.mark.parametrize("after", [False, True], ids=["at", "after"])
@pytest.mark.parametrize("crashes", [False, True], ids=["goes on", "crashes"])
def test_a_rewriting_that_is_interrupted_loses_no_block_and_leaves_none(after: bool, crashes: bool) -> None:
    for at in itertools.count(1):
        engine = MemoryEngine()
        events = filled(engine, [(cts, 2) for cts in range(1, 9)], block_rows=4)
        settle(events)
        with pytest.MonkeyPatch.context() as patched:
            methods = [(engine, "write"), (events, "retire"), (events, "rejoin"), (events._readers, "newest")]
            interrupting = _Interrupting(patched, at, after, *methods)
            try:
                _rewritten(events, engine, _Eager(events))
            except KeyboardInterrupt:
                assert interrupting.left <= 0
        if interrupting.left > 0:
            assert at > 10, "there is more in it than that"
            return
        if crashes:
            engine.flush()
            engine.crash()
            events = EventStore(engine, TABLE, block_rows=4)
        seal(events, [(9, rows_of(9, 2))], 9)
        settle(events)
        events.drop_below_floor(9)
        with events.view(9) as view:
            assert stored_ids(engine) == {block.data for block in view.blocks}
        assert names_of(scanned(events, 9)) == [f"{cts}/{i}" for cts in range(1, 10) for i in range(2)]


def test_data_held_by_a_view_at_the_crash_go_afterwards():
    engine = MemoryEngine()
    events = filled(engine, [(cts, 2) for cts in range(1, 9)])
    view = events.view(8)
    settle(events)
    engine.flush()
    engine.crash()
    del view
    events = EventStore(engine, TABLE)
    assert len(stored_ids(engine)) == 9
    assert events._delete_dead() == 8
    assert len(stored_ids(engine)) == 1
    assert len(names_of(scanned(events, 8))) == 16


def test_missing_and_damaged_blocks_are_data_loss(engine):
    events = filled(engine, [(1, 5), (2, 5)])
    key = event_data_key(TABLE.id, 2)
    raw = engine.get(key)

    def put(value):
        batch = WriteBatch()
        batch.delete(key) if value is None else batch.put(key, value)
        engine.write(batch)

    damaged = [None, b"", raw[:-1], raw + b"\x00", engine.get(event_data_key(TABLE.id, 1))]
    damaged += [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(0, len(raw), 97)]
    for value in damaged:
        put(value)
        assert len(names_of(scanned(events, 1))) == 5
        with pytest.raises(DataLoss, match="block 2 of event table 'calls'"):
            list(scanned(events, 2))
    put(raw)
    for value in (b"", b"{}", b'{"v":9}', b"[]", b"\xff"):
        batch = WriteBatch()
        batch.put(event_header_key(TABLE.id, 2), value)
        engine.write(batch)
        with pytest.raises(DataLoss, match="block 2 of event table 'calls'"):
            events.view(2)
        assert events.open_views == 0
    batch = WriteBatch()
    batch.put(event_meta_key(TABLE.id), b"{}")
    engine.write(batch)
    with pytest.raises(DataLoss):
        events.view(2)


# -- retention --------------------------------------------------------------------------------------


def test_a_floor_hides_rows_from_its_cts_on(engine):
    events = EventStore(engine, TABLE)
    seal(events, [(cts, rows_of(cts, 2)) for cts in range(1, 6)], 5)
    floor(events, 7, 3000)
    for upto in (5, 6):
        assert len(names_of(scanned(events, upto))) == 10
        assert events.complete_since(upto) is None
    assert names_of(scanned(events, 7)) == ["3/0", "3/1", "4/0", "4/1", "5/0", "5/1"]
    assert events.complete_since(7) == 3000
    # a late event below the floor is invisible as well, whatever its commit
    seal(events, [(8, rows_of(8, 1, time=2))], 8)
    assert len(names_of(scanned(events, 8))) == 6
    floor(events, 9, 2000)  # a floor never sinks
    assert events.complete_since(9) == 3000


def test_blocks_below_the_floor_are_dropped_when_no_reader_needs_them(engine):
    events = filled(engine, [(cts, 2) for cts in range(1, 6)])
    view = events.view(5)
    floor(events, 7, 3001)
    assert events.drop_below_floor(6) == 0
    assert events.drop_below_floor(7) == 2
    assert len(names_of(view.scan())) == 10
    assert len(stored_ids(engine)) == 5
    view.close()
    events.compact(2)
    assert len(stored_ids(engine)) == 3
    assert names_of(scanned(events, 7)) == ["3/1", "4/0", "4/1", "5/0", "5/1"]
    with pytest.raises(SnapshotTooOld, match="from 7 on"):
        events.view(6)
    assert events.open_views == 0
    assert EventStore(engine, TABLE).time_range_us() == (3000, 5001)
    floor(events, 7, 3001)
    floor(events, 5, 1000)
    assert events.complete_since(7) == 3001


def test_destroying_a_table(engine):
    events = filled(engine, [(cts, 1) for cts in range(1, 30)])
    with events.view(9):
        settle(events)
    for batch in destroy(engine, TABLE.id):
        engine.write(batch)
    assert list(engine.scan(b"", None)) == []


# -- sums from headers ------------------------------------------------------------------------------


def test_summaries_are_exact_and_read_boundary_blocks_only(monkeypatch):
    engine = MemoryEngine()
    events = EventStore(engine, TABLE)
    big = 2**63 - 1
    every = []
    for start in range(1, 31, 3):
        parts = []
        for cts in range(start, start + 3):
            rows = rows_of(cts, 4)
            for i, row in enumerate(rows):
                row["n"] = big if i % 2 == 0 else (None if cts % 3 == 0 else -big - 1 if cts % 7 == 0 else big)
            parts.append((cts, rows))
            every += [(cts, row) for row in rows]
        seal(events, parts, start + 2)
    floor(events, 25, 10_001)
    fetched = counting(engine, monkeypatch)
    for upto in range(32):
        fetched.clear()
        seen = [row for cts, row in every if cts <= upto and (upto < 25 or row["ts"] >= 10_001)]
        with events.view(upto) as view:
            assert summed(view) == totals(seen)
        assert len(fetched) <= 2


# -- everything at once -----------------------------------------------------------------------------


class Blocks(RuleBasedStateMachine):
    """A log of commits, floors and retractions; the store may be behind it, crash, and be fed from it again.

    Whatever was sealed, compacted, settled, combined, dropped or lost, each cut answers as lists do (R23).
    """

    @initialize(block_rows=st.integers(1, 40), block_bytes=st.integers(100, 5_000))
    def begin(self, block_rows, block_bytes):
        self.engine = MemoryEngine()
        self.options = {"block_rows": block_rows, "block_bytes": block_bytes}
        self.events = EventStore(self.engine, TABLE, **self.options)
        self.cts = 0
        self.log: list[tuple[int, list[dict[str, Any]]]] = []
        self.floors: list[tuple[int, int]] = []
        self.retractions: list[tuple[int, EventNames, set[str]]] = []
        self.dropped = 0
        self.views: list[tuple[Any, list[str]]] = []

    def gone(self, upto):
        return {name for cts, _, names in self.retractions if cts <= upto for name in names}

    def expected(self, upto, events_upto, after=0, skip=0, take=None, low=-1, high=10**9):
        low = max([low, *(time for cts, time in self.floors if cts <= upto)])
        rows = [row for cts, rows in self.log if after < cts <= min(upto, events_upto) for row in rows]
        rows = rows[skip:] if take is None else rows[skip : skip + take]
        gone = self.gone(upto)
        return [row for row in rows if low <= row["ts"] < high and row["s"] not in gone]

    @rule(count=st.integers(1, 12), time=st.integers(0, 50), gap=st.integers(1, 3))
    def commit(self, count, time, gap):
        self.cts += gap
        self.log.append((self.cts, rows_of(self.cts, count, time)))

    @rule(time=st.integers(0, 50_000))
    def enter_floor(self, time):
        self.cts += 1
        self.floors.append((self.cts, time))
        self.save()

    @precondition(lambda self: self.log)
    @rule(chosen=st.sets(st.integers(0, 300), min_size=1))
    def retract(self, chosen):
        self.cts += 1
        gone = self.gone(self.cts)
        every = [(cts, i, row["s"]) for cts, rows in self.log for i, row in enumerate(rows) if row["s"] not in gone]
        removed = sorted({every[i % len(every)] for i in chosen}) if every else []
        if removed:
            stamps, positions, names = zip(*removed, strict=True)
            names_of_events = EventNames(np.array(stamps, np.uint64), np.array(positions, np.int64))
            self.retractions.append((self.cts, names_of_events, set(names)))
            self.save()

    def save(self):
        """What a whole pass of consolidation writes, of floors and retractions."""
        for cts, time in self.floors:
            floor(self.events, cts, time)
        for cts, names, _ in self.retractions:
            seal(self.events, [part for part in self.log if part[0] <= cts], cts)
            batch = WriteBatch()
            self.events.erase(batch, cts, names)
            self.engine.write(batch)

    @rule(share=st.floats(0, 1))
    def seal(self, share):
        upto = int(self.cts * share)
        seal(self.events, [part for part in self.log if part[0] <= upto], upto)

    @rule(max_rows=st.integers(2, 100), share=st.floats(0, 1))
    def compact(self, max_rows, share):
        self.events.compact(max_rows, self.unneeded(share))

    def unneeded(self, share):
        """No snapshot before it is read from then on."""
        oldest = int(self.cts * share)
        self.dropped = max(self.dropped, oldest)
        return oldest

    @rule(every=st.booleans(), file_rows=st.integers(1, 40), share=st.floats(0, 1), steps=st.integers(1, 5))
    def settle(self, every, file_rows, share, steps):
        for _ in range(steps):
            oldest = self.unneeded(share)
            self.events.settling.step(nullcontext(), partial(int, oldest), every=every, file_rows=file_rows)

    @rule(share=st.floats(0, 1))
    def drop(self, share):
        self.events.drop_below_floor(self.unneeded(share))

    @rule(keep=st.integers(0, 10))
    def crash(self, keep):
        self.engine.crash(keep)
        self.views.clear()
        self.events = EventStore(self.engine, TABLE, **self.options)
        self.save()

    @rule()
    def flush(self):
        self.engine.flush()

    def view(self, upto):
        try:
            return self.events.view(upto)
        except SnapshotTooOld:
            assert upto < self.dropped
            return None

    @rule(upto=st.integers(0, 100))
    def open_view(self, upto):
        view = self.view(upto)
        if view is not None:
            self.views.append((view, [row["s"] for row in self.expected(upto, view.events_upto)]))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def close_view(self, data):
        view, expected = self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))
        with view:
            assert names_of(view.scan(columns=["s"])) == expected

    @rule(
        upto=st.integers(0, 100),
        after=st.integers(0, 100),
        reverse=st.booleans(),
        skip=st.integers(0, 30),
        take=st.none() | st.integers(0, 30),
        low=st.integers(0, 50_000),
        width=st.integers(0, 50_000),
    )
    def read(self, upto, after, reverse, skip, take, low, width):
        view = self.view(upto)
        if view is None:
            return
        with view:
            every = self.expected(upto, view.events_upto)
            assert sorted(names_of(view.scan(ordered=False))) == sorted(row["s"] for row in every)
            assert summed(view) == totals(every)
            times = {"time_from": low, "time_to": low + width}
            part = self.expected(upto, view.events_upto, after, low=low, high=low + width)
            found = names_of(view.scan(after=after, reverse=reverse, **times))
            assert found == [row["s"] for row in (reversed(part) if reverse else part)]
            assert summed(view, **times) == totals(self.expected(upto, view.events_upto, low=low, high=low + width))
            if not self.dropped:  # blocks that were dropped are counted no more
                part = self.expected(upto, view.events_upto, after, skip, take)
                assert names_of(view.scan(after=after, skip=skip, take=take)) == [row["s"] for row in part]

    @invariant()
    def blocks_are_in_order_and_their_data_known(self):
        if not hasattr(self, "events"):
            return
        meta, blocks, files = self.events._manifest.read()
        for left, right in itertools.pairwise(blocks):
            assert left.last_cts <= right.first_cts
            assert left.settled or not right.settled
        assert all(len(block.erased) <= 1 for block in blocks if block.settled)
        assert files == settled_files(self.engine, TABLE.id)
        named = {block.data for block in blocks} | {file.number for file in files}
        named |= {one.data for block in blocks for one in block.erased} - {0}
        named |= {one.data for file in files for one in file.erased}
        assert stored_ids(self.engine) == named | set(meta.dead)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(stateful_step_count=60)


def test_what_is_blank_may_be_of_a_retraction_that_is_not_unneeded_any_more() -> None:
    """The store is fed from the log again, and a snapshot is open by then that is older than what was unneeded."""
    state = Blocks()
    state.begin(block_rows=1, block_bytes=100)
    state.commit(count=5, gap=1, time=0)
    state.retract(chosen={0, 1})
    state.compact(max_rows=2, share=1.0)
    state.commit(count=3, gap=1, time=0)
    state.retract(chosen={0})
    state.compact(max_rows=2, share=0.0)
    state.blocks_are_in_order_and_their_data_known()
    state.read(after=0, low=-1, reverse=False, skip=0, take=None, upto=100, width=50_000)


def test_the_types_of_this_table():
    assert TYPES["d"] == ColumnType("decimal", 9, 2)


# -- narrow columns ------------------------------------------------------------------------------------

EDGES = [
    0,
    1,
    255,
    256,
    65_535,
    65_536,
    *(2**bits - less for bits in (24, 32, 40, 48, 56) for less in (1, 0)),
    2**63 - 1,
]


@given(
    st.sampled_from(EDGES),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=30),
    st.sampled_from(["int64", "timestamp", "decimal(18,3)"]),
)
def test_integers_come_back_whatever_width_they_are_stored_in(
    span: int, low: int, places: list[float | None], type_name: str
) -> None:
    """Around every width, at both ends of the numbers, with nulls."""
    schema = event_table_schema("e", "ts", {"ts": "timestamp", "v": type_name})
    type_ = schema.column("v").type
    least = max(type_.stored_min, min(low, type_.stored_max - min(span, type_.stored_max - type_.stored_min)))
    most = min(type_.stored_max, least + span)
    values = [None if p is None else min(most, least + int(p * (most - least))) for p in places] + [least, most]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(len(values)), pa.int64()).cast(TIMESTAMP), stored_column(type_, values)], ["ts", "v"]
    )
    engine = MemoryEngine()
    events = EventStore(engine, dataclasses.replace(schema, id=300))
    writes = WriteBatch()
    events.seal(writes, [part_of(7, batch)], 7)
    engine.write(writes)
    with events.view(7) as view:
        found = pa.Table.from_batches(list(view.scan()))
        assert found.column("v").combine_chunks().equals(batch.column("v"))
        assert list(view.scan(columns=["v"], where=bind(col("v").is_null(), lambda name: type_)))[:1] == [
            b for b in [batch.select(["v"]).filter(batch.column("v").is_null())] if b.num_rows
        ]


def test_small_numbers_take_few_bytes() -> None:
    schema = dataclasses.replace(event_table_schema("e", "ts", {"ts": "timestamp", "v": "int64"}), id=300)
    rng = np.random.default_rng(1)
    values = rng.integers(10**12, 10**12 + 250, 10_000)
    batch = pa.RecordBatch.from_arrays([pa.array(values).cast(TIMESTAMP), pa.array(values)], ["ts", "v"])
    engine = MemoryEngine()
    writes = WriteBatch()
    EventStore(engine, schema).seal(writes, [part_of(7, batch)], 7)
    assert writes.size_bytes < 2.2 * 10_000
