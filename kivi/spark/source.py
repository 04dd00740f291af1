"""The data source that Spark registers: ``format("kivi")``."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from kivi.errors import InvalidArgument, Unavailable
from kivi.spark.feed import AggregateFeed
from kivi.spark.options import Options
from kivi.spark.reading import FilteringReader, Reader
from kivi.spark.schemas import Target
from kivi.spark.sink import BatchWriter, StreamWriter
from kivi.spark.summary import SummaryReader, summary_of
from kivi.spark.tail import EventTail, StreamReader, stream_schema, streamed

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["KiviDataSource"]

_FILTERS_PROCESS: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class KiviDataSource(DataSource):
    """``spark.dataSource.register(kivi.spark.KiviDataSource)``; ``kivi.spark.session`` has done it."""

    @classmethod
    def name(cls) -> str:
        return "kivi"

    def _target(self) -> tuple[Options, Target]:
        options = Options.of(self.options)
        return options, options.ask(lambda db: Target.of(db, options.table, options.as_of))

    def schema(self) -> StructType:
        """From the catalog. It is not told whether a stream asks."""
        options, target = self._target()
        if options.aggregate is not None:
            return summary_of(target, options.aggregate)
        return stream_schema(target, options)

    def reader(self, schema: StructType) -> Reader:
        options, target = self._target()
        if options.commit_ts:
            raise InvalidArgument("option commitTs is for streams: spark.readStream")
        if options.retractions == "deliver":
            raise InvalidArgument('option retractions "deliver" is for streams: spark.readStream')
        if options.aggregate is not None:
            return SummaryReader(options, target, schema)
        target.check_readable(schema)
        return (FilteringReader if _asks_for_filters() else Reader)(options, target, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        options = Options.of(self.options)
        if options.aggregate is not None:
            raise InvalidArgument(
                "option aggregate is for spark.read: a stream reads an event table, or an aggregate's rows"
            )
        target = options.ask(lambda db: streamed(db, options, schema))
        return (AggregateFeed if target.kind == "aggregate" else EventTail)(options, target, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        options, target = self._target()
        target.check_appendable(schema, False, options.deletes)
        return BatchWriter(options, target, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        options = Options.of(self.options)
        writer = StreamWriter(options, schema, overwrite)
        with suppress(Unavailable):  # the tasks will wait for the server and look then; an abort needs no table
            writer.target(options.client())
        return writer


def _asks_for_filters() -> bool:
    """Whether this is the process in which Spark plans a read with filters."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_PROCESS in sys.modules or (main is not None and main.name == _FILTERS_PROCESS)
