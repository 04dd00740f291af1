"""The limit: one lz4 Arrow block of the events and one of their deltas, in one synced write batch of RocksDB.

No transactions, no checks, no readers, no network, one thread: what the layout alone costs. RocksDB's own log is used
and synced, which holds the GIL; that makes no difference to a single thread.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.data import SLOT_US
from bench.peers import Job, Outcome, answer, take_turns

_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def encoded(block: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema, options=_LZ4) as writer:
        writer.write(block)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def decoded(block: Any) -> Any:
    with pa.ipc.open_stream(pa.py_buffer(block)) as reader:
        return reader.read_all()


def key(kind: bytes, number: int) -> bytes:
    """Of the events (``e``) or the deltas (``d``) of a batch."""
    return kind + number.to_bytes(8, "big")


def deltas(events: Any) -> Any:
    """(endpoint, slot) -> sum, count, of one batch with ``ts`` as an int64 of microseconds."""
    slot = pc.multiply(pc.divide(events.column("ts"), SLOT_US), SLOT_US)
    columns = {"endpoint_id": events.column("endpoint_id"), "slot": slot, "v": events.column("resp_time_us")}
    return summed(pa.table(columns), [("v", "sum"), ("v", "count")])


def summed(table: Any, measures: list[tuple[str, str]]) -> Any:
    return table.group_by(["endpoint_id", "slot"], use_threads=False).aggregate(measures)


def main(job: Job) -> Outcome:
    pool = job.made()
    batches = pool.integers
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    db = Rdict(job.directory, options)
    synced = WriteOptions()
    synced.sync = True
    written = 0

    def once(i: int) -> None:
        nonlocal written
        batch = WriteBatch(raw_mode=True)
        batch.put(key(b"e", written), encoded(batches[i]))
        batch.put(key(b"d", written), encoded(deltas(batches[i])))
        db.write(batch, synced)
        written += 1

    sent, events, seconds = take_turns(pool, once, job.seconds)
    whole = summed(
        pa.concat_tables(decoded(db[key(b"d", n)]) for n in range(written)), [("v_sum", "sum"), ("v_count", "sum")]
    )
    stored = sum(decoded(db[key(b"e", n)]).num_rows for n in range(written))
    if stored != sum(sent) * pool.batch_rows:
        raise AssertionError(f"{stored} events are stored, {sum(sent) * pool.batch_rows} were sent")
    return Outcome(
        sent, events, seconds, len(whole), pc.sum(whole["v_count_sum"]).as_py(), pc.sum(whole["v_sum_sum"]).as_py(),
        f"rocksdict {importlib.metadata.version('rocksdict')}, default options, sync=True",
    )  # fmt: skip


if __name__ == "__main__":
    answer(main)
