"""Spark's types and kivi's: what fits where, said before any row moves.

=============== ======================================== =====================
kivi            a data frame may bring                   a read gives
=============== ======================================== =====================
bool            boolean                                  boolean
int64           tinyint, smallint, int, bigint           bigint
float64         float, double, tinyint, smallint, int    double
decimal(p, s)   a decimal whose digits all fit           decimal(p, s)
string          string                                   string
bytes           binary                                   binary
timestamp       timestamp (a moment)                     timestamp
quantiles(s)    nothing                                  binary
list(t)         nothing                                  array of t
top(t, k)       nothing                                  array of (value, count)
=============== ======================================== =====================

The last three are measures of aggregates. A quantile is a column by its text, declared (``derived``) or named by the
option ``columns``: ``quantile(latency, 0.99)``, a double. The last of a top's array has the value null where some
observations were of values that are not counted one by one: its count is that of all these *others*.

Columns go by name. A column that the table does not have is an error; one that the data frame does not have is
null, except the event time. Into a row table a row is written as a transaction would write it: its value columns are
put, its delta columns are added to, and a column that the data frame does not have stays as it is. ``timestamp_ntz``
is a reading of a clock of nobody knows which zone, and is refused.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

from kivi.arrow.columns import arrow_type, rows_from_batch
from kivi.errors import InvalidArgument, SchemaError
from kivi.model.derived_columns import parse_expression
from kivi.model.predicate_text import type_names
from kivi.model.types import ColumnType

if TYPE_CHECKING:
    from kivi.client.database import Database

__all__ = ["Target", "arrow_schema", "spark_batch", "spark_schema", "spark_type"]


@dataclass(frozen=True, slots=True)
class Target:
    """A table as far as Spark is concerned: its kind, and the types of its columns in order. Pickles."""

    table: str
    kind: str
    key: tuple[str, ...]
    columns: dict[str, ColumnType]
    event_time: str | None
    is_sharded: bool = False

    @staticmethod
    def of(db: Database, table: str, as_of: int | dt.datetime | None = None) -> Target:
        """As the catalog has it now, or as a snapshot of then sees it. Raises NotFound, SnapshotTooOld."""
        described: dict[str, Any]
        if as_of is None:
            described = db.describe(table)
        else:
            with db.snapshot(as_of=as_of) as snapshot:
                described = snapshot._table_schema(table).description()
        types = {name: ColumnType.read(text) for name, text in type_names(described).items()}
        kind, event_time = described["kind"], described.get("event_time")
        return Target(table, kind, tuple(described["key"]), types, event_time, bool(described.get("shard_by")))

    def type_of(self, name: str) -> ColumnType:
        """Of a column, or of an expression over an aggregate's columns that goes by its text. Raises SchemaError."""
        if name in self.columns:
            return self.columns[name]
        if self.kind != "aggregate" or name.isidentifier():
            raise SchemaError(f"table {self.table!r} has no column {name!r}; it has {', '.join(self.columns)}")
        parse_expression(name, self.columns)
        return ColumnType("float64")

    def check_appendable(self, frame: spark.StructType, overwrite: bool, deletes: str | None = None) -> None:
        """Raises SchemaError, InvalidArgument unless every row of ``frame`` can become an event, or a row's writes;
        ``deletes`` is a column of bool that the table does not have, and that says which rows are deleted."""
        if self.kind not in ("event", "row"):
            raise InvalidArgument(
                f"{self.table!r} is a table of kind {self.kind}: Spark writes to event tables and row tables, and the "
                "aggregates and views declared on them follow in the same commit"
            )
        if deletes is not None and (self.kind != "row" or deletes in self.columns):
            raise InvalidArgument(
                f"option deletes names a column of a data frame for a row table, which the table itself does not have: "
                f"{self.table!r} is a table of kind {self.kind} with {', '.join(self.columns)}"
            )
        if overwrite:
            raise InvalidArgument(f'{self.table!r} can only be appended to by a stream: use outputMode("append")')
        seen: set[str] = set()
        for column in frame.fields:
            if column.name in seen:
                raise SchemaError(f"the data frame names the column {column.name!r} twice")
            seen.add(column.name)
            if column.name == deletes:
                if not isinstance(column.dataType, spark.BooleanType):
                    raise SchemaError(f"column {deletes!r}, which says what to delete, is of boolean")
                continue
            if column.name not in self.columns:
                raise SchemaError(
                    f"table {self.table!r} has no column {column.name!r}; it has {', '.join(self.columns)}"
                )
            if not _fits(column.dataType, self.columns[column.name]):
                raise SchemaError(
                    f"column {column.name!r} of the data frame is {column.dataType.simpleString()}, which does not "
                    f"always fit into {self.columns[column.name]} of table {self.table!r}: cast it"
                )
        if deletes is not None and deletes not in seen:
            raise SchemaError(f"the data frame lacks {deletes!r}, the column of option deletes")
        if self.kind == "event" and self.event_time not in seen:
            raise SchemaError(f"the data frame lacks {self.event_time!r}, the event time of table {self.table!r}")
        if lacking := [name for name in self.key if name not in seen]:
            raise SchemaError(f"the data frame lacks {lacking[0]!r}, a key column of table {self.table!r}")

    def conform(self, batches: list[pa.RecordBatch], deletes: str | None = None) -> pa.Table:
        """The rows with the table's columns in the table's types and order; of a row table with those that they have,
        and with the column that says what to delete."""
        rows = pa.Table.from_batches(batches)
        fields = [field.with_nullable(True) for field in arrow_schema(spark_schema(self))]
        if self.kind == "row":
            fields = [field for field in fields if field.name in rows.column_names]
            fields += [] if deletes is None else [pa.field(deletes, pa.bool_())]
        arrays = [
            rows.column(field.name).cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in fields
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def check_readable(self, wanted: spark.StructType) -> None:
        """Raises SchemaError unless ``wanted``, which the user may have given, is what a read would give."""
        named = tuple(column.name for column in wanted.fields if not column.name.isidentifier())
        offered = {column.name: column.dataType for column in spark_schema(self, (*self.columns, *named)).fields}
        for column in wanted.fields:
            if offered.get(column.name) != column.dataType:
                have = offered[column.name].simpleString() if column.name in offered else "not there"
                raise SchemaError(
                    f"column {column.name!r} of table {self.table!r} is {have}, and the schema given for the read "
                    f"says {column.dataType.simpleString()}"
                )


def spark_schema(target: Target, columns: tuple[str, ...] | None = None) -> spark.StructType:
    """The schema of the rows that a read gives. Raises SchemaError for a column that is not there."""
    names = tuple(target.columns) if columns is None else columns
    return spark.StructType(
        [spark.StructField(name, spark_type(target.type_of(name)), name not in target.key) for name in names]
    )


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """The Arrow form in which Spark exchanges rows of ``schema``; for kivi's types it is kivi's own."""
    return to_arrow_schema(schema, timezone="UTC")


def spark_type(type_: ColumnType) -> spark.DataType:
    """The type of the values that a read gives of a column."""
    if not type_.of:
        return from_arrow_type(arrow_type(type_))
    item = spark_type(ColumnType.parse(type_.of))
    if type_.name == "list":
        return spark.ArrayType(item, containsNull=False)
    count = spark.StructField("count", spark.LongType(), nullable=False)
    return spark.ArrayType(spark.StructType([spark.StructField("value", item), count]), containsNull=False)


def spark_batch(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """What a read gave, as ``wanted``, the ``arrow_schema`` of the same columns: states of several values as arrays."""
    for i, field in enumerate(wanted):
        if pa.types.is_list(field.type):
            name = batch.schema.field(i).name
            values = [row[name] for row in rows_from_batch(batch.select([name]))]
            if pa.types.is_struct(field.type.value_type):
                pairs = [top.to_plain() for top in values]
                values = [[{"value": value, "count": count} for value, count in top] for top in pairs]
            batch = batch.set_column(i, field, pa.array(values, field.type))
    return batch.cast(wanted)


_SMALL: Final = (spark.ByteType, spark.ShortType, spark.IntegerType)
_FIT: Final[dict[str, tuple[type[spark.DataType], ...]]] = {
    "bool": (spark.BooleanType,),
    "int64": (*_SMALL, spark.LongType),
    "float64": (*_SMALL, spark.FloatType, spark.DoubleType),
    "decimal": (spark.DecimalType,),
    "string": (spark.StringType,),
    "bytes": (spark.BinaryType,),
    "timestamp": (spark.TimestampType,),
}


def _fits(given: spark.DataType, type_: ColumnType) -> bool:
    """Whether every value of the one is a value of the other."""
    if isinstance(given, spark.DecimalType) and type_.name == "decimal":
        whole = type_.precision - type_.scale
        return given.scale <= type_.scale and given.precision - given.scale <= whole
    return isinstance(given, _FIT[type_.name])
