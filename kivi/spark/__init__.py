"""Spark reads from kivi and writes to it: ``format("kivi")``, exactly once.

::

    spark = kivi.spark.session("app")          # or, in a session of your own:
    spark.dataSource.register(kivi.spark.KiviDataSource)

    query = (events.writeStream.format("kivi").option("endpoint", "localhost:7420").option("table", "invocations")
             .option("checkpointLocation", ...).start())
    frame.write.format("kivi").option("endpoint", ...).option("table", ...).mode("append").save()
    spark.read.format("kivi").option("endpoint", ...).option("table", "endpoint_5m").load()
    spark.readStream.format("kivi").option("endpoint", ...).option("table", "invocations").load()

How a micro-batch gets in exactly once
--------------------------------------
Spark may run a task twice, run two attempts of it at once, kill the driver at any line, and after a restart run the
last batch again, with other partitions and other rows in them. Only one thing is stable: the number of the batch
within its query. So nothing that a task does may count, and what counts must happen in one place, once::

    task, on any machine      rows -> Arrow -> stage (durable in the server's log, invisible)   -> its id ..
                                                                                                        |
    driver, when all tasks    one transaction: append the stages that are named, and the             <-'
    have succeeded            batch token (spark/<table>/<application id>, batch number)
                              with the events, in one log record

* A task that fails, is killed, or loses against its twin leaves a stage that nobody names. It expires.
* The reply to the commit is lost: the driver repeats it under the same token, and the server returns the first
  commit timestamp. If the driver gives up, Spark calls ``abort`` and later replays the batch: the token is known,
  the replay's stages are dropped, even where its rows were cut differently.
* ``abort`` gives stages up, which is safe at any time: the server passes over those that a commit has named, and a
  commit that still is on its way and finds them gone does nothing, so that the replay does it.
* Batches without rows commit too. The numbers of a scope have no gap, so a batch that was left out (a checkpoint
  that was copied from elsewhere) is an error and not a hole in the data.

The application id is the query's id, which lives in the checkpoint. Delete the checkpoint and Spark begins a new
query that reads its input from the start: to kivi this is another application, and everything is appended again.
The first batch of a second application id into a table therefore warns. ``option("applicationId", ...)`` gives a
name of your own: keep it only as long as the checkpoint, since batches numbered as before are taken for repeats.

What the API does not give, and where it comes from instead
-----------------------------------------------------------
``write`` is not told batch or query: they are local properties of the task. ``commit`` and ``abort`` run on a
fresh object in another process and see only messages, so messages carry the query's id. A Python sink cannot use
output mode ``update``; send events, never totals: kivi does the adding up.

Overwriting
-----------
``mode("overwrite")`` of a batch job is one commit as well: before its timestamp every reader has the old content, from
it on only the new, aggregates included; a job that fails has done nothing. A job may read the table that it overwrites;
what others commit to the table meanwhile is overwritten unseen, as ever with Spark. An aggregate is refused: overwrite
its source. Spark tells a Python data source nothing of ``mode("ignore")`` and ``mode("error")``, and has no way to ask
one whether a table is there: make tables with kivi, then append or overwrite.

Several tables at once
----------------------
``into_tables`` and ``write_batch`` (``foreach``) do the same in ``foreachBatch``, for several tables in one commit.

Progress
--------
``query.lastProgress["sink"]["numOutputRows"]`` is how many rows a batch brought into ``format("kivi")``. Spark's API
for Python sinks has no metrics of a sink's own. ``foreachBatch`` reports -1 there, whatever it calls, and its
``numInputRows`` counts the input as often as it is read. What is wanted beyond that, the query observes by itself, with
either sink: ``events.observe("kivi", count(lit(1)).alias("rows"), max("ts").alias("newest"))`` arrives in
``lastProgress["observedMetrics"]``. ``write_batch`` returns its commit timestamp and the rows of each table.

Reading
-------
A job reads one snapshot. Planning opens it as a shared lease, every task opens the lease by its name and renews it
while it reads. It ends by its time limit after the last task, as nothing tells a source that a job is over. A task
reads a range of keys, or of event time, of about as many rows as the others; of a sharded table on a cluster those of
the shards of one node, at that node (``shares``).

A stream that reads an event table follows its commits, each event once (``tail``); one of an aggregate follows its
changed rows (``feed``). Both go on from Spark's checkpoint, where offsets are commit timestamps (``offsets``). Spark
offers streams no filters to push down, and Python sources no metrics of their own: the query's progress has Spark's
counts, and the newest commit as ``latestOffset``.

Row tables
----------
Rows are staged as events are, and the commit writes them as a transaction would: value columns are put, delta columns
added to. Several rows of one key add up; of their value columns the last in the order of the tasks stays, so let a key
come once where that matters. One transaction is at most a million rows and 64 MiB of them.

The rooms: ``java`` finds one, ``launch`` starts the session, ``options``, ``schemas`` and ``filters`` translate,
``kafka`` parses records, ``applications`` says whose batches they are, ``sink`` and ``foreach`` write, ``commit`` is
the transaction of both, ``tail`` and ``feed`` stream (``offsets``: from where; ``holding``: a task's hold of the job's
snapshot; ``shares``: which node of a cluster reads what), ``source`` reads and is what Spark registers. Executors load
the client, never the store.

Comes in: data frames, and options. Goes out: stages and commits on a connection, and record batches. May not touch: the
store; it is a client as others are. Begin reading at ``sink`` and ``source``; ``summary`` reads an event table as one
row.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kivi.spark.java import JavaNotFound
from kivi.spark.launch import session

if TYPE_CHECKING:
    from kivi.spark.applications import SecondApplication
    from kivi.spark.foreach import Written, into_tables, write_batch
    from kivi.spark.kafka import from_kafka
    from kivi.spark.source import KiviDataSource

__all__ = [
    "JavaNotFound",
    "KiviDataSource",
    "SecondApplication",
    "Written",
    "from_kafka",
    "into_tables",
    "session",
    "write_batch",
]
_ROOMS: Final = {
    "KiviDataSource": "source",
    "SecondApplication": "applications",
    "Written": "foreach",
    "from_kafka": "kafka",
    "into_tables": "foreach",
    "write_batch": "foreach",
}


def __getattr__(name: str) -> Any:
    """Loads the names that need PySpark, which is installed only where it is asked for."""
    if name in _ROOMS:
        return getattr(importlib.import_module(f"kivi.spark.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'kivi.spark' has no attribute {name!r}")
