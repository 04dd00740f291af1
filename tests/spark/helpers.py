"""What the Spark tests share: input files with known sums, sinks that misbehave, a proxy that loses replies.

Imported by Spark's workers too, so it must stay importable by its name and import little.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kivi.spark.options import Options
from kivi.spark.sink import BatchWriter, Staged, Stager, StreamWriter
from kivi.spark.source import KiviDataSource
from tests.waiting import wait_until

SPARK_COLUMNS = "seq long, endpoint_id long, ts timestamp, resp_time_us long"
COLUMNS = {"seq": "int64", "endpoint_id": "int64", "ts": "timestamp", "resp_time_us": "int64"}


def settings(folder: Path) -> dict[str, str]:
    """Of a session that starts fast and keeps its files to ``folder``: a killed one leaves nothing elsewhere."""
    return {
        "spark.driver.extraJavaOptions": f'-Djava.io.tmpdir="{folder}"',
        "spark.local.dir": str(folder),
        "spark.python.authenticate.socketTimeout": "120s",  # for its Python processes to answer: 15 on an idle machine
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }


def appear(table: pa.Table, path: Path, time_s: float) -> None:
    """A file under its name when it is whole, and of a time of its own.

    Spark takes files in the order of their times, in milliseconds; files of the same one come in any order.
    """
    hidden = path.with_name(f".{path.stem}")
    pq.write_table(table, hidden)
    os.utime(hidden, (time_s, time_s))
    hidden.rename(path)


class Input:
    """A folder of Parquet files, and what their sums are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, int]] = []
        self.files = 0
        self._began_s = time.time() - 3_600
        self._random = random.Random(20261121)
        folder.mkdir(parents=True)

    def add(self, files: int, rows: int = 200) -> None:
        """More files, in order."""
        for _ in range(files):
            new = [
                {
                    "seq": len(self.rows) + i,
                    "endpoint_id": self._random.randrange(20),
                    "ts": 1_750_000_000_000_000 + self._random.randrange(3_600_000_000),
                    "resp_time_us": self._random.randrange(1 << 40),
                }
                for i in range(rows)
            ]
            table = pa.Table.from_pylist(new, schema=pa.schema(dict.fromkeys(COLUMNS, pa.int64()).items()))
            table = table.set_column(2, "ts", table["ts"].cast(pa.timestamp("us", tz="UTC")))
            appear(table, self.folder / f"{self.files:05}.parquet", self._began_s + self.files)
            self.rows += new
            self.files += 1


def create(db: Any, table: str) -> None:
    """The event table that ``Input`` fits, and an aggregate on it."""
    db.create_event_table(table, event_time="ts", columns=COLUMNS)
    import kivi

    db.create_aggregate(
        f"{table}_5m",
        source=table,
        group_by=["endpoint_id", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("resp_time_us"), "invocations": kivi.count(), "slowest": kivi.max("resp_time_us")},
        derived={"average": "total / invocations"},
    )


def check(db: Any, table: str, rows: list[dict[str, int]]) -> None:
    """The table holds exactly ``rows``, each once, and its aggregate their exact sums; both at one snapshot."""
    with db.snapshot() as snapshot:
        events = snapshot.to_arrow(table).to_pylist()
        aggregate = snapshot.to_arrow(f"{table}_5m").to_pylist()
    twice = [seq for seq, times in Counter(event["seq"] for event in events).items() if times > 1]
    assert (len(events), twice) == (len(rows), [])
    assert {(e["seq"], e["endpoint_id"], e["resp_time_us"]) for e in events} == {
        (r["seq"], r["endpoint_id"], r["resp_time_us"]) for r in rows
    }
    expected: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        slot = row["ts"] // 300_000_000 * 300
        expected.setdefault((row["endpoint_id"], slot), []).append(row["resp_time_us"])
    found = {
        (row["endpoint_id"], int(row["slot"].timestamp())): (row["total"], row["invocations"], row["slowest"])
        for row in aggregate
    }
    assert found == {key: (sum(times), len(times), max(times)) for key, times in expected.items()}


def committed(checkpoint: Path) -> list[int]:
    """The batches in Spark's own commit log."""
    folder = checkpoint / "commits"
    return sorted(int(f.name) for f in folder.iterdir() if f.name.isdecimal()) if folder.exists() else []


def wait_for_job(job: subprocess.Popen[str], holds: Callable[[], object]) -> None:
    """Until it holds, while the program runs."""

    def held() -> bool:
        came = bool(holds())
        assert came or job.poll() is None, job.stdout and job.stdout.read()
        return came

    wait_until(held, 300, pause_s=0.005)  # Spark takes a busy machine a minute to begin, and more


def forget_last(checkpoint: Path) -> int:
    """Deletes the last entry of Spark's commit log: as if the driver had died just before it was written."""
    last = committed(checkpoint)[-1]
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last


# -- sinks that misbehave -----------------------------------------------------------------------------


def fail_first_attempt() -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 0:
        raise RuntimeError("planted: this attempt dies after it has staged")


def kill_first_attempt() -> None:
    """SIGKILL to this Python worker, if it runs the first attempt of the first task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledStreamWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        message = super().write(iterator)
        kill_first_attempt()
        return message


class Killed(KiviDataSource):
    """The process of the first attempt of the first task is killed after it has staged its rows."""

    @classmethod
    def name(cls) -> str:
        return "kivi_killed"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return KilledStreamWriter(Options.of(self.options), schema, overwrite)


class KilledStager(Stager):
    """The same in ``foreachBatch``."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> tuple[tuple[bytes, ...], int]:
        said = super().__call__(batches)
        kill_first_attempt()
        return said


class PausedWriter(StreamWriter):
    def __init__(self, *arguments: Any, pause: str, note: str) -> None:
        super().__init__(*arguments)
        self._pause = pause
        self._note = note

    def commit(self, messages: Any, batchId: int) -> None:
        if self._pause == f"before {batchId}":
            self._wait()
        super().commit(messages, batchId)
        if self._pause == f"after {batchId}":
            self._wait()

    def _wait(self) -> None:
        Path(self._note).touch()
        time.sleep(60)  # until it is killed along with the driver
        os._exit(1)


class Paused(KiviDataSource):
    """Stands still ``before`` or ``after`` it has committed a batch, and notes that it does: time for a kill."""

    @classmethod
    def name(cls) -> str:
        return "kivi_paused"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        options = Options.of(self.options)
        return PausedWriter(options, schema, overwrite, pause=self.options["pause"], note=self.options["note"])


def meet_twin(table: str) -> None:
    """In the first task: waits until two attempts of it are here, so that both go on. Other tasks are fast."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == 0:
        folder = Path(os.environ["KIVI_TEST_TWINS"])
        (folder / f"{table}-{context.attemptNumber()}").touch()
        wait_until(lambda: len(list(folder.glob(f"{table}-*"))) >= 2, 120, reason="no other attempt has come")


class TwinWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        message = super().write(iterator)
        meet_twin(self._options.table)
        return message


class Twins(KiviDataSource):
    """The first task is a straggler until its speculative twin has staged the same rows; then both finish."""

    @classmethod
    def name(cls) -> str:
        return "kivi_twins"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return TwinWriter(Options.of(self.options), schema, overwrite)


class TwinStager(Stager):
    """The same in ``foreachBatch``."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> tuple[tuple[bytes, ...], int]:
        said = super().__call__(batches)
        meet_twin(self.options.table)
        return said


class FlakyStreamWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        message = super().write(iterator)
        fail_first_attempt()
        return message


class FlakyBatchWriter(BatchWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        message = super().write(iterator)
        fail_first_attempt()
        return message


class Flaky(KiviDataSource):
    """The first attempt of the first task dies after it has staged its rows."""

    @classmethod
    def name(cls) -> str:
        return "kivi_flaky"

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        return FlakyBatchWriter(*self._target(), overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return FlakyStreamWriter(Options.of(self.options), schema, overwrite)


class DoomedWriter(BatchWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        from pyspark import TaskContext

        message = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            raise RuntimeError("planted: this task never succeeds")
        return message


class Doomed(KiviDataSource):
    """One of the tasks fails each time, after it has staged; the others are fine."""

    @classmethod
    def name(cls) -> str:
        return "kivi_doomed"

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        return DoomedWriter(*self._target(), overwrite)


class SpyWriter(StreamWriter):
    def __init__(self, *arguments: Any, note: str) -> None:
        super().__init__(*arguments)
        self._note = note

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        message = super().write(iterator)
        with open(self._note, "a") as file:
            file.write(f"task {','.join(sorted(sys.modules))}\n")
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        super().commit(messages, batchId)
        with open(self._note, "a") as file:
            file.write(f"commit {','.join(sorted(sys.modules))}\n")


class Spy(KiviDataSource):
    """Notes which modules its processes have loaded."""

    @classmethod
    def name(cls) -> str:
        return "kivi_spy"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return SpyWriter(Options.of(self.options), schema, overwrite, note=self.options["note"])


# -- a network that loses replies ----------------------------------------------------------------------


class Proxy:
    """TCP to the server and back. When a request holds ``match``, its reply is lost: the request goes through,
    what comes back is dropped, and the connection breaks. With ``stays_down`` nobody gets through until ``up()``.
    """

    def __init__(self, port: int, match: bytes, *, stays_down: bool = False) -> None:
        self._target = port
        self._match = match
        self._stays_down = stays_down
        self._down = False
        self._connections: set[socket.socket] = set()
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        hang_up(self._listener)
        self._accepting.join()  # it opens no more: what nobody closes is the error of whatever test runs then
        for connection in list(self._connections):
            hang_up(connection)

    def up(self) -> None:
        self._down = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._down:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # it is down, and a client looks whether it is back
                client.close()
                continue
            self._connections |= {client, server}
            muted = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, muted), daemon=True).start()
            threading.Thread(target=self._replies, args=(server, client, muted), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        tail = b""
        try:
            while data := client.recv(1 << 16):
                tail = (tail + data)[-(len(data) + len(self._match)) :]
                if not self.lost and self._match in tail:
                    muted.set()
                    self.lost += 1
                    server.sendall(data)
                    time.sleep(0.5)  # the server commits; its reply is read and dropped
                    self._down = self._stays_down
                    break
                server.sendall(data)
        except OSError:
            pass
        for one in (client, server):
            self._connections.discard(one)
            hang_up(one)
        if self._down:
            for connection in list(self._connections):
                hang_up(connection)

    def _replies(self, server: socket.socket, client: socket.socket, muted: threading.Event) -> None:
        try:
            while data := server.recv(1 << 16):
                if not muted.is_set():
                    client.sendall(data)
        except OSError:
            pass
        hang_up(client)


def hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def commit_of(table: str, application_id: str, batch: int) -> bytes:
    """What the commit of a batch > 0 looks like on the wire, and nothing else does: the scope, then its number."""
    assert 0 < batch < 128
    return f"spark/{table}/{application_id}".encode() + b"\x10" + bytes([batch])
