"""``kivi export TABLE DIR``: a table at a snapshot as files that others read without kivi: Parquet, or a Delta table.

::

    DIR/part-0.parquet                            a table, or a small event table
    DIR/day=2026-03-01/part-0.parquet ...         events by the day of their time, in UTC, where there are many
    DIR/_delta_log/...                            with --format delta, beside the files

Every Parquet file says in its metadata what it is of: ``kivi.table``, ``kivi.snapshot`` (the commit timestamp up to
which it has everything), ``kivi.version``; a Delta table says so in its commit.

**Nothing half-written.** DIR is new, or empty, and gets its files all at once (``kivi.cli.folders``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet

from kivi.cli.append import FORMATS
from kivi.cli.folders import check_new, made_whole
from kivi.errors import InvalidArgument, KiviError

__all__ = ["export"]

MANY: Final = 5_000_000
"""Events from which on they are laid by days."""
_FILE_ROWS: Final = 5_000_000
_GROUP_ROWS: Final = 131_072
_OPEN_FILES: Final = 64


def export(
    snap: Any, table: str, description: Mapping[str, Any], to: str, *, format_: str = "parquet", by: str | None = None
) -> dict[str, Any]:
    """Writes the rows of an open snapshot; what was written. ``by``: "day", "none", or None: as many as they are.

    Raises InvalidArgument, and what reading raises; then nothing is there.
    """
    if (kind := FORMATS.get(Path(to).suffix.lower())) in ("csv", "json"):
        raise InvalidArgument(
            f"{to}: export writes a directory of {format_} files: name one, or take kivi scan {table} -o {kind} > {to}"
        )
    target = check_new(to)
    time = description.get("event_time")
    if by == "day" and time is None:
        raise InvalidArgument(f"{table} is no event table: only events are laid by days")
    if by is None:
        many = description["statistics"].get("rows_estimate", 0) >= MANY
        by = "day" if time is not None and many else "none"
    rows = _Rows(snap, table, time if by == "day" else None)
    with made_whole(target) as folder:
        try:
            folder.mkdir(parents=True)
            (_delta if format_ == "delta" else _parquet)(rows, folder)
        except BaseException:
            if rows.failure is not None:  # an engine of others tells of it in words
                raise rows.failure from None
            raise
    written = list(target.rglob("*.parquet"))
    return {
        "rows": rows.count,
        "snapshot": snap.ts,
        "files": len(written),
        "bytes": sum(path.stat().st_size for path in written),
    }


class _Rows:
    """The rows, read as they are written; ``day`` names the column of their day, None: there is none."""

    def __init__(self, snap: Any, table: str, time: str | None) -> None:
        self._snap, self.table, self._time = snap, table, time
        self.schema = snap.dataset(table).schema
        self.day = None
        if time is not None:
            self.day = next(name for name in ("day", "_day", "__day") if name not in self.schema.names)
            self.schema = self.schema.append(pa.field(self.day, pa.date32()))
        from kivi import __version__

        said = {"kivi.table": table, "kivi.snapshot": str(snap.ts), "kivi.version": __version__}
        self.said = said
        self.schema = self.schema.with_metadata(said)
        self.count = 0
        self.failure: KiviError | None = None

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._snap.scan_batches(self.table, any_order=True):
                self.count += batch.num_rows
                if self._time is not None:
                    days = pc.floor_temporal(batch.column(self._time), unit="day").cast(pa.date32())
                    batch = batch.append_column(self.day, days)
                yield batch.replace_schema_metadata(self.schema.metadata)
        except KiviError as error:
            self.failure = error
            raise


def _parquet(rows: _Rows, folder: Path) -> None:
    form = pa.dataset.ParquetFileFormat()
    partitioning = None
    if rows.day is not None:
        partitioning = pa.dataset.partitioning(pa.schema([(rows.day, pa.date32())]), flavor="hive")
    pa.dataset.write_dataset(
        rows.reader(),
        folder,
        basename_template="part-{i}.parquet",
        format=form,
        file_options=form.make_write_options(compression="zstd", version="2.6"),
        partitioning=partitioning,
        preserve_order=True,
        max_partitions=1_000_000,
        max_open_files=_OPEN_FILES,
        max_rows_per_file=_FILE_ROWS,
        max_rows_per_group=_GROUP_ROWS,
    )
    if rows.count == 0:  # a reader of the directory is to find the columns all the same
        pa.parquet.write_table(rows.schema.empty_table(), folder / "part-0.parquet")


def _delta(rows: _Rows, folder: Path) -> None:
    try:
        import deltalake
    except ImportError:
        raise InvalidArgument(
            "a Delta table needs deltalake, which is not installed: pip install 'kivi[delta]'"
        ) from None
    deltalake.write_deltalake(
        folder,
        rows.reader(),
        name=rows.table,
        description=f"{rows.table}, exported by kivi",
        partition_by=None if rows.day is None else [rows.day],
        commit_properties=deltalake.CommitProperties(custom_metadata=rows.said),
    )
