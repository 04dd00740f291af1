"""``option("aggregate", "count(), sum(resp_time_us), max(ts) as newest")``: an event table's events as one row.

The server answers, from block headers as far as they know (``Snapshot.summary``), at the snapshot of the job. A measure
is ``count()``, or ``count``, ``sum``, ``min`` or ``max`` of a column; its column in the data frame goes by how it is
written, without blanks, or by the name after ``as``. ``option("start", ...)`` and ``option("end", ...)`` bound the
event time, ``option("where", "endpoint_id == 251 & resp_time_us > 1000")`` says which events. Filters of the data frame
are on its one row.

Nulls are skipped. Of no values the sum is 0, as everywhere in kivi (Spark's own is null), the least and the largest are
null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.measuring import measured
from kivi.model.predicate_text import where
from kivi.model.schema import Column, OperatorCall, TableSchema
from kivi.spark.holding import held
from kivi.spark.reading import Reader, SharedSnapshot
from kivi.spark.schemas import arrow_schema, spark_type

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition

    from kivi.client.database import Database
    from kivi.spark.options import Options
    from kivi.spark.schemas import Target

__all__ = ["SummaryReader", "measures_of", "summary_of"]

_MEASURE: Final = re.compile(r"\s*(\w+)\s*\(\s*(\*|\w*)\s*\)\s*(?:as\s+(\w+)\s*)?", re.IGNORECASE)


def measures_of(text: str) -> dict[str, OperatorCall]:
    """The measures by their names, in order. Raises InvalidArgument."""
    out: dict[str, OperatorCall] = {}
    for part in text.split(","):
        found = _MEASURE.fullmatch(part)
        operator = found[1].lower() if found else ""
        if found is None or operator not in ("sum", "count", "min", "max"):
            raise InvalidArgument(
                f"option aggregate: {part.strip()!r} is not count(), or sum, count, min or max of a column, like "
                "sum(resp_time_us) as total; an average is a sum divided by a count"
            )
        argument = found[2] if found[2] != "*" else ""
        if operator == "count" or argument:
            name = found[3] or f"{operator}({argument})"
            if name in out:
                raise InvalidArgument(f"option aggregate names {name!r} twice")
            out[name] = OperatorCall(cast(Any, operator), argument or None)
        else:
            raise InvalidArgument(f"option aggregate: {operator} needs a column, like {operator}(resp_time_us)")
    return out


def summary_of(target: Target, text: str) -> StructType:
    """The schema of the one row that a read gives. Raises InvalidArgument, SchemaError."""
    columns = tuple(Column(name, type_) for name, type_ in target.columns.items())
    kind: Any = target.kind
    if kind != "event":
        raise InvalidArgument(f"{target.table!r} is no event table, and only events are summed up: read its rows")
    found, _ = measured(TableSchema(target.table, kind, (), columns), measures_of(text), checked=False)
    return StructType([StructField(c.name, spark_type(c.type), c.operator in ("min", "max")) for c in found])


class SummaryReader(Reader):
    """One job's read of one row: one task."""

    def __init__(self, options: Options, target: Target, schema: StructType) -> None:
        super().__init__(options, target, schema)
        offered = {field.name: field.dataType for field in summary_of(target, options.aggregate or "")}
        for field in schema:
            if offered.get(field.name) != field.dataType:
                raise SchemaError(f"option aggregate gives no column {field.name!r} of that type: it gives {offered}")
        if options.where is not None:
            types = {name: str(type_) for name, type_ in target.columns.items()}
            self._where = where(options.where, types, "option where")

    def _parts(self, db: Database, lease: bytes, ts: int) -> list[InputPartition]:
        return [SharedSnapshot(lease, ts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SharedSnapshot)
        options = self._options
        measures = measures_of(options.aggregate or "")
        with held(self._options, partition.lease, partition.ts) as snapshot:
            row = snapshot.summary(options.table, measures, start=options.start, end=options.end, where=self._where)
        names = self._schema.fieldNames()
        yield pa.RecordBatch.from_pylist([{name: row[name] for name in names}], schema=arrow_schema(self._schema))
