"""``make reconcile``: every aggregate again, computed by Spark from the events, against the one that kivi keeps.

::

    one snapshot --.--> aggregates as kivi has them -----------------------.
                   '--> events --> Spark: group, sum, count, maximum --> compare --> rows, differences
    landed files ---------------> Spark: the same --------------------> compare -'

Both sides are read with ``spark.read.format("kivi")`` at the commit timestamp of one snapshot, which a lease keeps
while the job runs, so writers go on meanwhile. The difference has to be zero, to the last microsecond.

* ``--endpoint`` (or ``KIVI_ENDPOINT``): a server that is running, and perhaps being fed. Of the landed invocations
  those count whose files the snapshot's batches name; the others are on their way (``--all-files``: count them too).
* Without one: the store of the last demonstration, ``--data``; with all landed files.
* Without that either: calls a web service for a few seconds, lands the real trace, brings both in, and reconciles that.
  It is deleted afterwards.

Exit code 0: no difference. 1: there are, and the first ones are told. 2: it could not compare, and says why.
It writes nothing to the store, and its own files are in a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

import kivi
from apm_demo import live_job, tables, trace_job
from apm_demo.children import Child, Failure
from apm_demo.jobs import session
from apm_demo.landing import landed
from apm_demo.recompute import Aggregate, Comparison, aggregates, compare, rebuild, whole
from apm_demo.say import Voice
from apm_demo.trace import land_trace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Line", "main", "reconcile"]

_LEASE_S: Final = 900.0
_CALLS_S: Final = 10.0
_PIECES: Final = 3
_TOLD_LINES: Final = 15  # of Spark's log, where it fails


@dataclass(frozen=True, slots=True)
class Line:
    """One aggregate: how many events are in it, if it counts them; and both comparisons, if anything lands for it."""

    aggregate: Aggregate
    events: int | None
    kivi: Comparison
    files: Comparison | None

    @property
    def differing(self) -> int:
        return self.kivi.differing + (self.files.differing if self.files else 0)


@dataclass
class Report:
    ts: int
    lines: list[Line] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # files that landed and are in no batch yet
    gone: list[str] = field(default_factory=list)  # files of a batch that are not where they landed


def reconcile(
    spark: SparkSession, endpoint: str, landing: Path | None, *, all_files: bool = True, only: Sequence[str] = ()
) -> Report:
    """Everything, or ``only`` these aggregates, at one snapshot. Raises Failure, kivi's errors and Spark's."""
    with kivi.connect(endpoint, timeout=60) as db, db.snapshot(ttl_s=_LEASE_S) as snapshot:
        report = Report(snapshot.ts)
        wanted = aggregates(db)
        if unknown := sorted(set(only) - {aggregate.name for aggregate in wanted}):
            raise Failure(f"{unknown[0]!r} is no aggregate; there are {', '.join(a.name for a in wanted)}")
        wanted = [aggregate for aggregate in wanted if not only or aggregate.name in only]

        def read(table: str) -> DataFrame:
            snapshot.renew(_LEASE_S)
            options = {"endpoint": endpoint, "table": table, "asOf": str(snapshot.ts)}
            return spark.read.format("kivi").options(**options).load()

        batches = snapshot.scan("batches") if "batches" in db.tables() else ()
        held = [name for row in batches for name in row["files"].split(",") if name]
        files = {} if landing is None else _landed(spark, landing, held, report, all_files)
        for source in sorted({aggregate.source for aggregate in wanted}):
            events = read(source).persist()
            from_files = files[source].persist() if source in files else None
            try:
                for aggregate in wanted:
                    if aggregate.source == source:
                        report.lines.append(_line(aggregate, read(aggregate.name), events, from_files))
            finally:
                for frame in filter(None, (events, from_files)):
                    frame.unpersist()
    return report


def _line(wanted: Aggregate, stored: DataFrame, events: DataFrame, from_files: DataFrame | None) -> Line:
    rebuilt = {"its events": rebuild(events, wanted)}
    if from_files is not None:
        rebuilt["the landed files"] = rebuild(from_files, wanted)
    count, (kivi, *files) = compare(whole(stored, wanted), rebuilt, wanted)
    return Line(wanted, count, kivi, files[0] if files else None)


def _landed(
    spark: SparkSession, landing: Path, held: Sequence[str], report: Report, all_files: bool
) -> dict[str, DataFrame]:
    """Event table -> what landed for it. Raises Failure for a directory where nothing lands."""
    folders = {"invocations": landing / "invocations", "llm_requests": landing / "trace"}
    if not any(folder.is_dir() for folder in folders.values()):
        raise Failure(f"{landing} has neither invocations nor trace in it: name the landing directory with --landing")
    found = {}
    if folders["invocations"].is_dir():
        there = {path.name: path for path in landed(folders["invocations"])}
        report.gone = sorted(set(held) - there.keys())
        report.waiting = sorted(there.keys() - set(held))
        paths = [str(path) for name, path in there.items() if all_files or name in set(held)]
        if paths:
            found["invocations"] = live_job.events(spark.read, paths)
    if folders["llm_requests"].is_dir() and landed(folders["llm_requests"]):
        found["llm_requests"] = trace_job.events(spark.read, str(folders["llm_requests"]))
    return found


@contextlib.contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """What Java and Spark say, which is not for the reader of the table; its end, if they fail."""
    kept = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except (PySparkException, Py4JError):
        os.write(kept, b"\n".join(log.read_bytes().splitlines()[-_TOLD_LINES:]) + b"\n")
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# -- what is told ---------------------------------------------------------------------------------------


def tell(report: Report, voice: Voice, all_files: bool) -> int:
    """The table and the verdict; the exit code."""
    width = max([len("aggregate"), *(len(line.aggregate.name) for line in report.lines)])
    heads = ("rows", "events", "differ from events", "differ from files")
    voice.line()
    voice.line(f"{'aggregate':{width}}" + "".join(f"{head:>{len(head) + 3}}" for head in heads))
    for line in report.lines:
        values = (line.kivi.rows, line.events, line.kivi.differing, line.files.differing if line.files else None)
        cells = ("-" if value is None else f"{value:,}" for value in values)
        text = "".join(f"{cell:>{len(head) + 3}}" for head, cell in zip(heads, cells, strict=True))
        voice.line(f"{line.aggregate.name:{width}}{text}", "bold red" if line.differing else "")
    voice.line()
    for line in report.lines:
        since = line.aggregate.since_us
        if since is not None:
            voice.note(f"{line.aggregate.name}: slots from {tables.moment(since)} on, above the retention floor")
        for sentence in [*line.kivi.first, *(line.files.first if line.files else ())]:
            voice.wrong(sentence)
    if report.gone:
        voice.wrong(f"{len(report.gone)} files of the store's batches are not there: {_few(report.gone)}")
    if report.waiting:
        said = "count as well" if all_files else "do not count yet"
        voice.note(f"{len(report.waiting)} landed files are in no batch, and {said}: {_few(report.waiting)}")
    differing = [line for line in report.lines if line.differing]
    if differing or report.gone:
        voice.line(f"{len(differing)} of {len(report.lines)} aggregates DIFFER at snapshot {report.ts}.", "bold red")
        return 1
    if not any(line.kivi.rows for line in report.lines):
        voice.wrong("there was nothing to compare: the aggregates are empty")
        return 2
    voice.line(f"No difference in {len(report.lines)} aggregates at snapshot {report.ts}.", "bold green")
    return 0


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")


# -- where the data are -----------------------------------------------------------------------------------


def serve(store: Path, work: Path, stack: contextlib.ExitStack) -> str:
    """A server on that directory until the stack ends; its endpoint."""
    child = Child("server", work / "server.log", "kivi.cli", "serve", "--data", str(store), "--listen", "localhost:0")
    stack.callback(child.stop)
    return child.wait_for("listening on", 60)


def make(work: Path, voice: Voice, stack: contextlib.ExitStack) -> tuple[Path, Path]:
    """(store, landing) in ``work``, with what a short demonstration would land; nothing is brought in yet."""
    landing = work / "landing"
    for name in ("invocations", "trace"):
        (landing / name).mkdir(parents=True)
    voice.step(f"there are no data of a demonstration: calling its web service for {_CALLS_S:.0f} s")
    web = Child("service", work / "service.log", "apm_demo.service", "--land", str(landing / "invocations"))
    stack.callback(web.stop)
    load = Child(
        "load", work / "load.log", "apm_demo.load", "--ports", web.wait_for("ready", 60), "--seconds", str(_CALLS_S)
    )
    stack.callback(load.stop)
    load.wait_for("answered", _CALLS_S + 60)
    load.stop()
    web.terminate()
    voice.note(f"{int(web.wait_for('landed', 30)):,} invocations landed")
    web.stop()
    voice.note(f"{land_trace(landing / 'trace', _PIECES):,} requests of the real trace landed, shuffled")
    return work / "store", landing


def bring(spark: SparkSession, endpoint: str, landing: Path, work: Path) -> None:
    """What landed, through the demonstration's own jobs. Raises Spark's errors."""
    with kivi.connect(endpoint) as db:
        tables.create(db)
        tables.create_rules(db)
    once: Mapping[str, Any] = {"availableNow": True}
    checkpoints = work / "checkpoints"
    live = live_job.start(spark, endpoint, landing / "invocations", checkpoints / "live", **once)
    live.awaitTermination()
    trace_job.start(spark, endpoint, landing / "trace", checkpoints / "trace", **once).awaitTermination()


def _run(args: argparse.Namespace, voice: Voice, stack: contextlib.ExitStack) -> int:
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kivi-reconcile-", ignore_cleanup_errors=True)))
    os.environ["SPARK_LOCAL_DIRS"] = str(work)
    endpoint, landing, fresh = args.endpoint, args.landing, False
    if not endpoint:
        store = args.data / "store"
        if store.is_dir():
            voice.step(f"starting kivi serve on {store}, which the last demonstration left")
            landing = landing or args.data / "landing"
        else:
            store, landing = make(work, voice, stack)
            fresh = True
        endpoint = serve(store, work, stack)
    kivi.connect(endpoint).close()  # a server that is not there is said before Spark starts
    voice.step("starting Spark")
    stack.enter_context(_stderr_to(work / "spark.log"))
    spark = session("apm_demo-reconcile", work)
    stack.callback(spark.stop)
    if fresh:
        voice.step("bringing in what landed, through the demonstration's own Spark jobs")
        bring(spark, endpoint, landing, work)
    all_files = args.all_files or not args.endpoint
    voice.step(f"recomputing the aggregates of {endpoint} from its events{' and the landed files' if landing else ''}")
    return tell(reconcile(spark, endpoint, landing, all_files=all_files, only=args.only), voice, all_files)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m apm_demo.reconcile",
        description="Recomputes every aggregate in Spark, from the events and from the landed files, and compares.",
        epilog="Exit code 0: no difference. 1: there are differences. 2: it could not compare.",
    )
    parser.add_argument(
        "--endpoint",
        default=os.environ.get("KIVI_ENDPOINT"),
        metavar="HOST:PORT",
        help="of a running server; default $KIVI_ENDPOINT, else one is started on DIR/store",
    )
    parser.add_argument(
        "--landing",
        type=Path,
        default=os.environ.get("APM_LANDING"),
        metavar="DIR",
        help="where files land (invocations/, trace/); default $APM_LANDING, else DIR/landing without --endpoint",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("demo-data"),
        metavar="DIR",
        help="of the last demonstration; default demo-data",
    )
    parser.add_argument("--only", action="append", default=[], metavar="AGGREGATE", help="this one; may be repeated")
    parser.add_argument("--all-files", action="store_true", help="files that are in no batch yet count too")
    args = parser.parse_args(arguments)
    voice = Voice()
    try:
        with contextlib.ExitStack() as stack:
            return _run(args, voice, stack)
    except KeyboardInterrupt:
        voice.line("interrupted; nothing is left behind")
        return 130
    except (Failure, OSError) as failure:
        voice.wrong(str(failure))
    except (kivi.KiviError, PySparkException, Py4JError) as error:
        voice.wrong(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    voice.line("It could not compare.")
    return 2


if __name__ == "__main__":
    sys.exit(main())
