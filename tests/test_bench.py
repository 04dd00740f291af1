"""What the measurements decide by: totals and rows are compared with what was sent, and a difference ends them.

No peers, no rates, no clock: those are `make bench`.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest

import kivi
import kivi.aio
from bench import front, history, hours, matching, notified, paced, peers, subscribers, tables, verify
from bench.appending import Order, started
from bench.data import SLOT_US, START_US, Pool, Totals, make
from bench.past import Past
from bench.peers import limit
from bench.producers import _check, _Producer
from bench.results import page, raw, write
from bench.server import Server
from bench.sheet import Ratio, Sheet, best, number, percentile
from bench.streaming import stream
from bench.together import run
from bench.verify import WrongTotals
from bench.writing import Written, at_a_pace
from tests.ports import Port
from tests.waiting import wait_until

KINDS = ("hot", "wide", "even-50")


def held(pool: Pool, sent: list[int]) -> pa.Table:
    """What a right aggregate holds, as kivi's read gives it."""
    expected = pool.expected(sent)
    columns = {"endpoint_id": expected.endpoint, "slot": expected.slot_us, "n": expected.count, "total": expected.total}
    return pa.table(columns)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_expected_equals_a_recount(kind: str) -> None:
    pool, sent = make(kind, 100, 500), [2, 0, 1, 3, 1]
    recount: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for times, batch in zip(sent, pool.batches, strict=True):
        for event in batch.set_column(1, "ts", batch.column(1).cast(pa.int64())).to_pylist() * times:
            row = recount[event["endpoint_id"], START_US + (event["ts"] - START_US) // SLOT_US * SLOT_US]
            row[0] += 1
            row[1] += event["resp_time_us"]
    expected = pool.expected(sent)
    rows = zip(expected.endpoint, expected.slot_us, expected.count, expected.total, strict=True)
    assert [((endpoint, slot), [count, total]) for endpoint, slot, count, total in rows] == sorted(recount.items())
    assert expected.totals == Totals(len(recount), 700, sum(total for _, total in recount.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_and_distinct_counts_equal_those_of_sorted_values(kind: str) -> None:
    pool, sent = make(kind, 100, 500), [2, 0, 1, 3, 1]
    values: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for times, batch in zip(sent, pool.integers, strict=True):
        for event in batch.to_pylist() * times:
            values[event["endpoint_id"], (event["ts"] - START_US) // SLOT_US].append(event["resp_time_us"])
    rows = [sorted(found) for _, found in sorted(values.items())]
    for percent in (50, 99, 100):
        exact = pool.values(sent, percent)
        assert exact.percentile.tolist() == [row[-(-percent * len(row) // 100) - 1] for row in rows]
        assert exact.distinct.tolist() == [len(set(row)) for row in rows]


def test_the_same_seed_makes_the_same_events() -> None:
    assert make("wide", 100, 300).batches == make("wide", 100, 300).batches
    assert make("hot", 100, 300, seed=1).batches != make("hot", 100, 300, seed=2).batches


def test_a_store_that_holds_what_was_sent_is_believed_and_one_event_more_is_not(tmp_path: Path) -> None:
    pool = make("wide", 500, 2_000)
    with kivi.open(tmp_path / "data") as db:
        tables.create(db)
        done = stream(db, tables.EVENTS, pool.batches, threads=3, seconds=60, warm_up=2, count=9)
        assert sum(done.sent) == 11 and done.events == 9 * 500 and len(done.at_s) == 9
        tables.check(db, pool.expected(done.sent), "kivi")
        db.append(tables.EVENTS, [{"endpoint_id": 3, "ts": START_US, "resp_time_us": 0}])
        with pytest.raises(WrongTotals, match="kivi holds .*count=5501.* was sent .*count=5500"):
            tables.check(db, pool.expected(done.sent), "kivi")


@pytest.mark.story
@pytest.mark.timeout(300)
def test_a_long_stream_ends_while_nobody_asks_what_it_did(tmp_path: Path) -> None:
    """What it says at its end is more than a pipe holds, which is made as small as one can be."""
    with Server(tmp_path / "data") as server, server.connect() as db:
        tables.create(db)
        with started(Order(server.endpoint, "hot", 10, 20, batches=1_000)) as appending:
            assert appending._process.stdout is not None
            room = fcntl.fcntl(appending._process.stdout, fcntl.F_SETPIPE_SZ, 4_096)
            wait_until(lambda: not appending.running(), 240)
            done = appending.streamed()
        assert len(json.dumps(done.at_s)) > 3 * room
        tables.check(db, make("hot", 10, 20).expected(done.sent), "kivi")


@pytest.mark.parametrize("column", ["endpoint_id", "slot", "n", "total"])
def test_a_row_that_differs_is_refused_even_where_the_totals_agree(column: str) -> None:
    pool = make("even-50", 100, 500)
    right = held(pool, [1] * 5)
    verify.every_row("kivi", right.take(list(reversed(range(len(right))))), pool.expected([1] * 5))
    values = right[column].to_pylist()
    values[7], values[8] = values[7] - 1, values[8] + 1
    wrong = right.set_column(right.schema.get_field_index(column), column, pa.array(values))
    with pytest.raises(WrongTotals, match="rows have a wrong"):
        verify.every_row("kivi", wrong, pool.expected([1] * 5))


def test_a_row_that_is_missing_is_refused() -> None:
    pool = make("even-50", 100, 500)
    with pytest.raises(WrongTotals, match="rows=49"):
        verify.every_row("kivi", held(pool, [1] * 5).slice(1), pool.expected([1] * 5))


@pytest.mark.parametrize("stamps", [[3, 1, 0], [3, 1], [3, 3, 1]])
def test_every_transaction_has_a_timestamp_of_its_own(stamps: list[int]) -> None:
    verify.each_own("kivi", [3, 1, 2], 3)
    with pytest.raises(WrongTotals):
        verify.each_own("kivi", stamps, 3)


def test_a_producer_whose_future_has_no_commit_is_refused(tmp_path: Path) -> None:
    pool = make("hot", 500, 1_500)  # more events than producers: as many as there are parts are used
    batch = pool.batches[0]
    with kivi.open(tmp_path / "data") as db:
        tables.create(db)
        commit_ts = db.append(tables.EVENTS, batch)
        producer = _Producer([batch.to_pylist()])
        producer.begin()
        producer.next()
        producer.commits = [[commit_ts] * 500]
        assert _check(db, pool, [producer], "kivi", each=False) == 500
        for commits in ([commit_ts] * 499, [commit_ts] * 499 + [0]):
            producer.commits = [commits]
            with pytest.raises(WrongTotals, match="500 events, 499 futures"):
                _check(db, pool, [producer], "kivi", each=False)


def test_each_timestamp_must_read_its_prefix(tmp_path: Path) -> None:
    pool = make("wide", 300, 300)
    with kivi.open(tmp_path / "data") as db:
        tables.create(db, history="1d")
        with db.appender(tables.EVENTS, each=True, max_events=70) as appender:
            futures = [appender.append(**event) for event in pool.batches[0].to_pylist()]
        stamps = np.array([future.result() for future in futures])
        tables.check_prefixes(db, pool, stamps, "kivi")
        swapped = np.arange(300)
        swapped[[0, 1]] = 1, 0
        for events, at in ((pool.taken(swapped), stamps), (pool, np.append(stamps[1:], stamps[-1]))):
            with pytest.raises(WrongTotals, match="as of event 0"):
                tables.check_prefixes(db, events, at, "kivi")


def test_the_limit_holds_what_it_was_given(tmp_path: Path) -> None:
    job = peers.Job("wide", 100, 1_000, 0.05, str(tmp_path / "limit"))
    outcome = limit.main(job)
    verify.same("limit", outcome.totals, job.made().expected(outcome.sent).totals)
    assert outcome.count >= outcome.events > 0


def filled() -> Sheet:
    ratios = [
        Ratio("a / b", lambda figures: figures["a", "x"] / figures["b", "x"], at_least=2.0),
        Ratio("a / c", lambda figures: figures["a", "x"] / best(figures, "c", "x", "y"), at_most=2.0),
    ]
    sheet = Sheet("goal1", "A title", ratios)
    for a, b in ((10.0, 4.0), (90.0, 30.0), (20.0, 20.0)):
        sheet.begin()
        sheet.record("a", "x", a, "events/s", events=5)
        sheet.record("b", "x", b, "events/s")
    sheet.skip("c", "it is not here")
    return sheet


def test_ratios_are_formed_within_each_run() -> None:
    ratio, spread = filled().compared()[0]
    assert spread is not None and (spread.least, spread.median, spread.greatest, spread.runs) == (1.0, 2.5, 3.0, 3)
    assert ratio.reached(spread.median)
    assert filled().compared()[1][1] is None


def test_the_page_says_what_was_reached_and_what_was_not_measured(tmp_path: Path) -> None:
    machine = {
        "at": "2026-01-01T00:00:00+00:00", "commit": "abc", "cores": 2, "processor": "P", "memory_bytes": 2**33,
        "system": "Linux", "filesystem": "ext4", "sync_p50_us": 200, "load_1m": 0.1, "versions": {"python": "3"},
    }  # fmt: skip
    result = raw(filled(), machine, {"quick": False, "runs": 3, "seconds": 5.0})
    path = write(tmp_path / "results", result)
    assert path.name == "goal1-2026-01-01T000000Z.json"
    text = (tmp_path / "RESULTS.md").read_text()
    assert text == page(tmp_path / "results")
    assert "| a / b | 2.5 | 1 to 3 | at least 2 | yes |" in text
    assert "| a / c | not measured |" in text and "Not measured: c (it is not here)." in text
    assert result["runs"][0][0] == {"system": "a", "case": "x", "value": 10.0, "events": 5}


def test_numbers_have_three_digits() -> None:
    assert [number(v) for v in (1234567.8, 999.4, 12.345, 0.01234, None)] == ["1,234,568", "999", "12.3", "0.0123", "-"]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([1.0], 99) == 1.0
    assert percentile(list(itertools.chain([1.0] * 99, [9.0])), 99) == 9.0


@pytest.mark.story
@pytest.mark.parametrize("kind", notified.KINDS)
def test_subscribers_are_told_what_their_ranges_select(kind: str, tmp_path: Path) -> None:
    """A real server, a process of subscribers, a writer at a pace; then one subscriber that asks for something else."""
    server = Server(tmp_path / "data")
    with server, server.connect() as db:
        notified.create(db, kind)
        order = subscribers.Order(server.endpoint, notified.TABLE, "seq", 0.0, 2_000.0)
        with subscribers.started(order) as told:

            async def measured() -> None:
                case = notified.Case(kind, server, told, share=10)
                async with await kivi.aio.connect(server.endpoint) as case.db:
                    await case.fill()
                    await case.subscribe(30)
                    await case.subscribe(20)
                    step = await case.step(100, 0.5)
                    assert step.queries == 20 and step.told > 50 and step.p99_ms >= step.p50_ms > 0
                    told.ranges([(0, matching.DOMAIN)], "value")
                    with pytest.raises(WrongTotals):
                        await case.step(100, 0.2)

            run(measured())


def test_the_matcher_is_compared_with_what_ranges_select() -> None:
    ranges, values = matching.Ranges(50, share=10), np.random.default_rng(3).integers(0, matching.DOMAIN, 200)
    query, at = ranges.selected(values, 20)
    found = {(q, i) for q in range(20) for i, v in enumerate(values) if ranges.low[q] <= v < ranges.high[q]}
    assert found == set(zip(query.tolist(), at.tolist(), strict=True)) and len(found) > 100


def test_writes_keep_their_pace() -> None:
    async def measured() -> Written:
        async def once(i: int) -> None:
            order.append(i)
            await asyncio.sleep(0.05)

        return await at_a_pace(once, 200, 0.2)

    order: list[int] = []
    written = run(measured())
    assert order == list(range(40)) and len(written.began_ns) == 40
    assert list(written.began_ns) == sorted(written.began_ns) and written.seconds >= 0.2


def test_events_of_the_past_are_the_same_again_and_as_many_come_late_as_are_wanted() -> None:
    past = Past(20_000, 0.5)
    assert list(past.batches()) == list(past.batches())
    times, in_order = (
        np.concatenate([batch["ts"].cast(pa.int64()).to_numpy() for batch in each.batches()])
        for each in (past, Past(20_000, 0.0))
    )
    assert len(times) == 20_000
    assert (np.diff(in_order) >= 0).all()
    assert 0.48 < np.mean(times < in_order) < 0.52
    assert 5 < np.mean((in_order - times)[times < in_order]) / 3_600_000_000 < 7
    ids = [trace_id for batch in past.traces() for trace_id in batch["trace_id"].to_pylist()]
    assert len(set(ids)) == 20_000
    assert ids[777] == past.trace_id(777)


def test_answers_of_history_are_compared_row_by_row() -> None:
    right = pa.table({"k": [1, 2, None], "p99": [10.0, 20.0, 30.0]})
    history._same("a question", right, pa.table({"key": [None, 2, 1], "p": [30.3, 20.0, 9.9]}))
    for wrong in (
        right.slice(1),
        right.set_column(0, "k", pa.array([1, 3, None])),
        right.set_column(1, "p99", pa.array([10.0, 21.0, 30.0])),
    ):
        with pytest.raises(WrongTotals, match="a question: kivi says"):
            history._same("a question", right, wrong)


def test_a_scan_of_history_that_lacks_an_event_is_refused() -> None:
    past = Past(1_000, 0.0)
    every = pa.Table.from_batches(list(past.batches()))
    history._whole(every, past)
    with pytest.raises(WrongTotals, match="a scan has 999 events"):
        history._whole(every.slice(1), past)


def test_a_slot_that_lacks_an_event_or_is_not_there_is_refused(tmp_path: Path) -> None:
    with kivi.open(tmp_path) as db:
        hours._create(db)
        db.append("events", [{"endpoint_id": i % 3, "ts": 10_000_000 * i, "resp_time_us": i} for i in range(6)])
        slots = {"0": (3, 0 + 1 + 2), "30000000": (3, 3 + 4 + 5)}
        hours._check(db, paced.Ran(0.0, [], slots), "a case")
        for wrong in (
            {**slots, "0": (4, 3)},
            {**slots, "0": (3, 4)},
            {**slots, "60000000": (1, 1)},
        ):
            with pytest.raises(verify.WrongTotals):
                hours._check(db, paced.Ran(0.0, [], wrong), "a case")


def test_seconds_are_those_that_have_reads_and_appends() -> None:
    ran = paced.Ran(100.0, [(100.5, 0.2), (101.5, 0.7), (103.5, 0.1)], {})
    seconds = hours._by_second(ran, [(99.9, 9.0), (100.1, 0.001), (101.0, 0.002), (101.9, 0.004), (102.0, 0.1)])
    assert [second["second"] for second in seconds] == [0, 1]
    assert [second["events"] for second in seconds] == [paced.BATCH, 0]
    assert [second["reads_p99_ms"] for second in seconds] == [1.0, 4.0]
    assert [second["appends_p99_ms"] for second in seconds] == [200.0, 700.0]


def test_a_course_goes_from_phase_to_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: now))
    schedule = paced._Schedule([paced.Phase(0.2, paced.BATCH / 0.05, 0.0), paced.Phase(0.1, None, 0.5)])
    turns = []
    while (turn := schedule.take()) is not None:
        turns.append(turn)
        now = max(now, turn[1]) + 0.001
    assert [i for i, _, _ in turns] == list(range(len(turns)))
    paced_ones = [due - schedule.began_s for _, due, late in turns if not late]
    assert 2 <= len(paced_ones) <= 5
    assert all(abs(due - 0.05 * i) < 1e-6 for i, due in enumerate(paced_ones))
    full = [due - schedule.began_s for _, due, late in turns if late]
    assert full and min(full) >= 0.2 and max(full) < 0.31


@pytest.mark.timeout(300)
def test_spans_are_counted_once_however_they_are_sent_and_one_that_lacks_is_refused(tmp_path: Path) -> None:
    otlp = Port()
    arguments = ("--otlp", f"localhost:{otlp.number}", "--http", "localhost:0")
    with Server(tmp_path / "data", *arguments) as server:
        for i, how in enumerate(front._HOW):
            target = arguments[1] if how.startswith("gRPC") else server.http
            front._send(how, target, 2 * i, 2)
            front._send(how, target, 0, 2 * i + 2, True)
            front._check_spans(server, how, 2 * i + 2)
        with pytest.raises(WrongTotals, match="4,608 spans were sent"):
            front._check_spans(server, "one export less", 9)


@pytest.mark.timeout(300)
def test_a_poller_that_is_told_of_no_change_where_there_is_one_is_refused(tmp_path: Path) -> None:
    pool = make("wide", 100, 300)
    with Server(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        tables.create(db)
        assert len(run(front._rounds(server, db, pool.batches, 5))) == 3 * 2 * 5 * len(front._POLLED)
        changed = db.append(tables.EVENTS, pool.batches[0])

        async def polled(status: int, commit_ts: int) -> None:
            at = urlsplit(server.http)
            poller = front._Poller(*await asyncio.open_connection(at.hostname, at.port))
            try:
                await poller.poll(commit_ts, status)
            finally:
                poller.close()

        run(polled(200, changed))
        for status, commit_ts in ((304, changed), (200, changed + 1)):
            with pytest.raises(WrongTotals, match="is answered"):
                run(polled(status, commit_ts))
