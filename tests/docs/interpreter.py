"""The Python of a page's examples: reads statements as JSON lines from one pipe, answers on another.

Not imported by anything: ``examples.Interpreter`` runs it in a process of its own, so that what examples do to that (a
Spark session, an open store, an event loop) is over with the page. Its arguments are the folder in which it works, a
file for what it prints otherwise, and the two pipes.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def topic_of_files(spark: Any) -> Any:
    """A stream whose records have the shape of Kafka's, for examples that would need one."""
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path("topic")
    folder.mkdir()
    now = dt.datetime(2026, 7, 1, 12, 3, tzinfo=dt.UTC)
    event = {"customer": "acme", "application": "shop", "server": "s1", "endpoint_id": 251, "resp_time_us": 7_000}
    value = json.dumps({**event, "ts": now.isoformat()}).encode()
    kinds = (pa.binary(), pa.binary(), pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.int32())
    names = "key value topic partition offset timestamp timestampType".split()  # noqa: SIM905
    row = (None, value, "invocations", 0, 0, now, 0)
    columns = [pa.array([cell], kind) for cell, kind in zip(row, kinds, strict=True)]
    pq.write_table(pa.table(columns, names), folder / "0.parquet")
    sql = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
    return spark.readStream.schema(sql).parquet(str(folder))


def main() -> None:
    os.setsid()
    sys.path[0] = ""
    os.chdir(sys.argv[1])
    with open(sys.argv[2], "wb") as log:
        for standard in (1, 2):
            os.dup2(log.fileno(), standard)
    names: dict[str, Any] = {"__name__": "__main__", "topic_of_files": topic_of_files}
    requests, answers = os.fdopen(int(sys.argv[3])), os.fdopen(int(sys.argv[4]), "w")
    for pipe in (requests, answers):
        os.set_inheritable(pipe.fileno(), False)
    with asyncio.Runner() as loop:
        for line in requests:
            asked = json.loads(line)
            output, error = io.StringIO(), ""
            try:
                code = compile(
                    "\n" * (asked["line"] - 1) + asked["code"],
                    asked["page"],
                    "exec",
                    flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                    dont_inherit=True,
                )
                with contextlib.redirect_stdout(output):
                    if code.co_flags & inspect.CO_COROUTINE:
                        loop.run(_awaited(code, names))
                    else:
                        exec(code, names)
            except BaseException:
                error = traceback.format_exc()
            answers.write(json.dumps({"output": output.getvalue(), "error": error}) + "\n")
            answers.flush()


async def _awaited(code: Any, names: dict[str, Any]) -> None:
    await eval(code, names)


if __name__ == "__main__":
    main()
