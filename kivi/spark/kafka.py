"""From Kafka's records to a table's columns. The connector's jar is not part of PySpark: see docs/howto/spark.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kivi.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["from_kafka"]


def from_kafka(records: DataFrame, columns: StructType | str) -> DataFrame:
    """The JSON objects in ``value``, as rows of ``columns``: a schema, as ``spark.read...load().schema`` gives it.

    ``records`` is what ``readStream.format("kafka")`` gives, or anything with a binary column ``value``. Moments are
    in ISO 8601, with their zone. A field that is not there is null; one that ``columns`` does not name is left out;
    records without a value (tombstones) are passed over. A value that is no such object stops the query: nothing of
    its batch is written, and nothing is skipped in silence. Raises SchemaError without a binary ``value``.
    """
    from pyspark.sql import functions as F

    if dict(records.dtypes).get("value") != "binary":
        raise SchemaError("these are not Kafka's records: they have no binary column 'value'")
    text = F.decode(F.col("value"), "UTF-8")
    parsed = F.from_json(text, columns, {"mode": "FAILFAST"}).alias("event")
    return records.where("value is not null").select(parsed).select("event.*")
