"""The sink's own logic against a real server, without a Spark: its objects are called as Spark calls them."""

from __future__ import annotations

import pickle
import warnings

import pyarrow as pa
import pytest

from kivi.errors import InvalidArgument, NotFound, OutOfSequence, Unavailable
from kivi.spark.options import Options
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.sink import BatchWriter, SecondApplication, StreamWriter
from tests.spark.helpers import Input, check
from tests.waiting import wait_until


@pytest.fixture
def rows(source: Input) -> list[pa.RecordBatch]:
    import pyarrow.parquet as pq

    source.add(1)
    return pq.read_table(source.folder / "00000.parquet").to_batches(max_chunksize=50)


@pytest.fixture
def writer(server, db, table):
    """A sink as Spark makes one for each process: pickled and read back."""

    def writer(application: str = "one", kind: type = StreamWriter, **options):
        given = {"endpoint": server.endpoint, "table": table, "applicationId": application, "timeout": "5", **options}
        made = Options.of(given)
        target = Target.of(db, table)
        return pickle.loads(pickle.dumps(kind(made, spark_schema(target) if kind is StreamWriter else target)))

    return writer


def test_twins_of_a_task_both_finish_and_one_is_named(writer, rows, source, db, table) -> None:
    """Speculative execution: Spark hands the driver the message of the winner only."""
    first, twin = writer().write(iter(rows)), writer().write(iter(rows[::-1]))
    assert first.rows == twin.rows == 200
    check(db, table, [])  # staged is not visible
    writer().commit([twin], 0)
    check(db, table, source.rows)


def test_a_replay_with_other_contents_returns_the_first_commit(writer, rows, source, db, table) -> None:
    writer().commit([writer().write(iter(rows[:2])), writer().write(iter(rows[2:]))], 0)
    live = db.stats()["stage_bytes"]
    writer().commit([writer().write(iter(rows))], 0)
    check(db, table, source.rows)
    wait_until(lambda: db.stats()["stage_bytes"] <= live)  # what the replay staged is dropped; no answer waits for that


def test_the_same_commit_again_names_stages_that_are_committed(writer, rows, source, db, table) -> None:
    """The driver did not hear the answer and asks again: the token is looked up before the stages are (R16)."""
    message = writer().write(iter(rows))
    writer().commit([message], 0)
    writer().commit([message], 0)
    check(db, table, source.rows)


def test_abort_after_a_commit_takes_nothing_away(writer, rows, source, db, table) -> None:
    message = writer().write(iter(rows))
    writer().commit([message], 0)
    writer().abort([message, None], 0)
    db.consolidate()
    check(db, table, source.rows)


def test_abort_gives_the_stages_up_and_the_replay_brings_its_own(writer, rows, source, db, table) -> None:
    before = db.stats()["stage_bytes"]
    message = writer().write(iter(rows))
    assert db.stats()["stage_bytes"] > before
    writer().abort([message], 0)
    wait_until(lambda: db.stats()["stage_bytes"] <= before)
    writer().commit([writer().write(iter(rows))], 0)
    check(db, table, source.rows)


def test_batches_without_rows_take_their_numbers_and_a_gap_is_an_error(writer, rows, source, db, table) -> None:
    writer().commit([writer().write(iter(()))], 0)
    writer().commit([], 1)
    with pytest.raises(OutOfSequence):
        writer().commit([writer().write(iter(rows))], 3)
    check(db, table, [])
    writer().commit([writer().write(iter(rows))], 2)
    check(db, table, source.rows)


def test_an_old_batch_after_many_others_is_still_known(writer, rows, source, db, table) -> None:
    sink = writer()
    sink.commit([sink.write(iter(rows))], 0)
    for batch in range(1, 200):
        sink.commit([], batch)
    db.consolidate()
    sink.commit([sink.write(iter(rows))], 0)
    check(db, table, source.rows)


def test_the_first_batch_of_a_second_application_warns(writer, rows) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer("one").commit([], 0)
        writer("one").commit([], 1)
    with pytest.warns(SecondApplication, match=r"application two begins to feed table .* \(one\)"):
        writer("two").commit([], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer("two").commit([], 1)
        writer("one").commit([], 2)


def test_without_the_querys_id_the_sink_says_what_it_needs(writer, rows) -> None:
    sink = writer("")
    message = sink.write(iter(rows))
    assert message.query_id is None  # no Spark task runs here
    with pytest.raises(InvalidArgument, match="applicationId"):
        sink.commit([message], 0)


def test_bad_values_fail_the_task_and_leave_no_stage(writer, rows, db, table) -> None:
    before = db.stats()["stage_bytes"]
    bad = rows[0].set_column(2, "ts", pa.nulls(rows[0].num_rows, rows[0].schema.field("ts").type))
    with pytest.raises(InvalidArgument):
        writer().write(iter([bad]))
    wait_until(lambda: db.stats()["stage_bytes"] <= before)


def test_a_batch_job_commits_once_since_a_stage_does(writer, rows, source, db, table) -> None:
    job = writer(kind=BatchWriter)
    twin = pickle.loads(pickle.dumps(job))
    messages = [job.write(iter(rows[:1])), twin.write(iter(rows[1:]))]
    job.commit(messages)
    with pytest.raises(NotFound):
        twin.commit(messages)
    check(db, table, source.rows)
    writer(kind=BatchWriter).commit([None])  # a job without rows


def test_a_server_that_is_away_is_waited_for_and_then_named() -> None:
    options = Options.of({"table": "t", "endpoint": "127.0.0.1:9", "timeout": "0.3"})
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        options.client()
