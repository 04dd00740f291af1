"""What a data frame may bring, what the options mean: said before any row moves."""

from __future__ import annotations

import datetime as dt
import pickle
import re

import pytest
from pyspark.sql import types as spark

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.types import ColumnType
from kivi.spark.options import Options
from kivi.spark.schemas import Target, arrow_schema, spark_schema

TYPES = ["bool", "int64", "float64", "decimal(10,2)", "string", "bytes", "timestamp"]
SPARK = {
    "bool": spark.BooleanType(),
    "byte": spark.ByteType(),
    "short": spark.ShortType(),
    "int": spark.IntegerType(),
    "long": spark.LongType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "decimal(10,2)": spark.DecimalType(10, 2),
    "decimal(9,1)": spark.DecimalType(9, 1),
    "decimal(10,1)": spark.DecimalType(10, 1),
    "decimal(10,3)": spark.DecimalType(10, 3),
    "string": spark.StringType(),
    "binary": spark.BinaryType(),
    "timestamp": spark.TimestampType(),
    "timestamp_ntz": spark.TimestampNTZType(),
    "date": spark.DateType(),
    "array": spark.ArrayType(spark.LongType()),
    "struct": spark.StructType([]),
}
FITS = {
    "bool": {"bool"},
    "int64": {"byte", "short", "int", "long"},
    "float64": {"byte", "short", "int", "float", "double"},
    "decimal(10,2)": {"decimal(10,2)", "decimal(9,1)"},
    "string": {"string"},
    "bytes": {"binary"},
    "timestamp": {"timestamp"},
}


def target(**columns: str) -> Target:
    types = {name: ColumnType.parse(text) for name, text in {"ts": "timestamp", **columns}.items()}
    return Target("t", "event", (), types, "ts")


def frame(**columns: spark.DataType) -> spark.StructType:
    return spark.StructType([spark.StructField(name, type_) for name, type_ in columns.items()])


@pytest.mark.parametrize("wanted", TYPES)
def test_every_type_against_every_type(wanted: str) -> None:
    for name, given in SPARK.items():
        if name not in FITS[wanted]:
            with pytest.raises(SchemaError, match=rf"'v' .*{re.escape(wanted)}"):
                target(v=wanted).check_appendable(frame(ts=spark.TimestampType(), v=given), overwrite=False)
        else:
            target(v=wanted).check_appendable(frame(ts=spark.TimestampType(), v=given), overwrite=False)


def test_columns_go_by_name() -> None:
    ts = spark.TimestampType()
    target(v="int64", w="string").check_appendable(frame(w=spark.StringType(), ts=ts), overwrite=False)
    with pytest.raises(SchemaError, match="has no column 'V'; it has ts, v"):
        target(v="int64").check_appendable(frame(ts=ts, V=spark.LongType()), overwrite=False)
    with pytest.raises(SchemaError, match="lacks 'ts'"):
        target(v="int64").check_appendable(frame(v=spark.LongType()), overwrite=False)
    with pytest.raises(InvalidArgument, match="append"):
        target().check_appendable(frame(ts=ts), overwrite=True)


def test_what_a_read_gives_is_what_the_store_gives() -> None:
    from kivi.arrow.columns import arrow_type

    table = target(**{f"c{i}": text for i, text in enumerate(TYPES)})
    assert arrow_schema(spark_schema(table)).types == [arrow_type(type_) for type_ in table.columns.values()]
    with pytest.raises(SchemaError, match="has no column 'x'"):
        spark_schema(table, ("c1", "x"))
    with pytest.raises(SchemaError, match="is bigint, and the schema given for the read says string"):
        table.check_readable(frame(c1=spark.StringType()))


def test_options() -> None:
    given = {"TABLE": "t", "EndPoint": " h:1 ", "accessToken": "s3cret", "columns": "a, b", "asOf": "17", "tls": "true"}
    options = Options.of(given)
    assert (options.table, options.endpoint, options.columns, options.as_of) == ("t", "h:1", ("a", "b"), 17)
    assert (options.tls, options.timeout_s, options.lease_ttl_s) == (True, 60.0, 600.0)
    assert "s3cret" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    moment = Options.of({"table": "t", "asOf": "2026-07-01T12:00:00Z"}).as_of
    assert moment == dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "bad",
    [
        {"table": ""},
        {"timeout": "soon"},
        {"timeout": "-1"},
        {"timeout": "nan"},
        {"columns": "a,,b"},
        {"columns": "a,a"},
        {"asOf": "yesterday"},
        {"asOf": "2026-07-01T12:00:00"},
        {"leaseTtl": "0s"},
        {"applicationId": "a\nb"},
    ],
)
def test_bad_options_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        Options.of({"table": "t", **bad})
