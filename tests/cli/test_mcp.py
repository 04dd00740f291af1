"""``kivi mcp`` with a real client of the protocol, over the pipes of a real process, on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import kivi
from kivi.cli.mcp import ROWS_MAX
from tests.serverproc import ROOT, ServerProcess

T0 = 1_750_000_000_000_000


def test_a_model_asks_and_cannot_write(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root-token-0123456789 admin\nreader-token-0123456789 read tables=calls,calls_5m\n")
    with ServerProcess(tmp_path / "data", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root-token-0123456789") as db:
            columns = {"route": "string", "ts": "timestamp", "us": "int64"}
            db.create_event_table("calls", event_time="ts", columns=columns)
            db.create_event_table("secrets", event_time="ts", columns=columns)
            slot = kivi.time_slot("ts", "5m", name="slot")
            measures = {"n": kivi.count(), "latency": kivi.quantiles("us")}
            db.create_aggregate("calls_5m", source="calls", group_by=["route", slot], measures=measures)
            db.append("calls", [{"route": f"/{i % 2}", "ts": T0 + i, "us": i} for i in range(600)])
        asyncio.run(_asked(server))


async def _asked(server: ServerProcess) -> None:
    import mcp  # takes most of a second, and every process of the tests loads this file

    process = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "kivi.cli", "--endpoint", server.endpoint, "--timeout", "60", "mcp"],
        env={**os.environ, "KIVI_TOKEN": "reader-token-0123456789"},
        cwd=str(ROOT),
    )
    async with mcp.Client(process) as client:

        async def call(name: str, **arguments: Any) -> Any:
            found = await client.call_tool(name, arguments)
            text = "".join(getattr(part, "text", "") for part in found.content)
            return text if found.is_error else json.loads(text)

        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(listed) == {"describe", "scan", "query", "match", "sql"}
        for tool in listed.values():
            assert tool.description and tool.annotations is not None and tool.annotations.read_only_hint

        assert [table["name"] for table in (await call("describe"))["tables"]] == ["calls", "calls_5m"]
        assert (await call("describe", table="calls"))["event_time"] == "ts"
        rows = await call("scan", table="calls_5m", prefix=["/1"], columns="route,n")
        assert rows["rows"] == [{"route": "/1", "n": 300}] and rows["snapshot"] > 0
        asked = await call(
            "query", table="calls", measures={"n": "count(where=us >= 300)", "p": "quantiles(us)"},
            group_by=["route"], derived={"p50": "quantile(p, 0.5)"}, order_by="-route", as_of=rows["snapshot"],
        )  # fmt: skip
        assert [(row["route"], row["n"]) for row in asked["rows"]] == [("/1", 150), ("/0", 150)]
        assert asked["snapshot"] == rows["snapshot"]
        matched = await call(
            "match", table="calls", pattern="A B", partition_by=["route"], define={"B": "us > prev(us)"},
            measures={"began": "first(A.ts)", "n": "count()"}, limit=3,
        )  # fmt: skip
        assert [row["n"] for row in matched["rows"]] == [2, 2, 2]
        every = await call("match", table="calls", pattern="A", measures={"n": "count()"}, limit=2)
        assert every["rows"] == [{"n": 1}, {"n": 1}]
        assert (await call("sql", text="select count(*) as n from calls"))["rows"] == [{"n": 600}]
        many = await call("sql", text="select us from calls order by us")
        assert len(many["rows"]) == ROWS_MAX and "ask for less" in many["more"]
        for name, arguments in (
            ("scan", {"columns": "us"}),
            ("query", {"measures": {"n": "count()"}, "group_by": ["us"]}),
            ("match", {"pattern": "A", "measures": {"n": "count()"}}),
        ):
            some = await call(name, table="calls", limit=ROWS_MAX, **arguments)
            assert len(some["rows"]) == ROWS_MAX and "more" not in some, name  # it asked for no more
            few = await call(name, table="calls", **arguments)
            assert few["rows"] == some["rows"][:100] and "only the first 100 rows" in few["more"], name
            many = await call(name, table="calls", limit=ROWS_MAX + 100, **arguments)
            assert many["rows"] == some["rows"] and "ask for less" in many["more"], name
        assert "limit is a number of rows" in await call("scan", table="calls", limit=-1)
        odd = await call("sql", text="select 1 as a, 2 as a, 'infinity'::timestamp as t")
        assert odd["rows"] == [{"a": 1, "a_1": 2, "t": "infinity"}]
        for name, arguments, said in (
            ("scan", {"table": "nope"}, "is not for table"),
            ("scan", {"table": "secrets"}, "PermissionDenied"),
            ("scan", {"table": "calls", "where": "us >"}, "InvalidArgument"),
            ("query", {"table": "calls", "measures": {"n": "median(us)"}}, "median"),
            ("sql", {"text": "drop table calls"}, "InvalidArgument"),
            ("sql", {"text": "select * from secrets"}, "secrets"),
        ):
            assert said in await call(name, **arguments), name
        assert (await call("sql", text="select count(*) as n from calls"))["rows"] == [{"n": 600}]
