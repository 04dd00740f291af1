"""The client for TypeScript: made from the routes as they are; its types hold, and it reads what the store says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import kivi
from tests.conftest import require
from tests.server.test_http import base
from tests.serverproc import ROOT, ServerProcess

CLIENT = ROOT / "clients/typescript"
PROGRAM = """
import { Kivi, KiviError } from "./index.js";

const db = new Kivi(process.argv[2] ?? "");
const say = (said: unknown) => console.log(JSON.stringify(said));
say((await db.tables()).map((table) => table.name));
say((await db.describe("scores")).kind);
say((await db.rows("scores", { key: ["2"] })).rows);
say((await db.rows("scores", { order_by: "-n", limit: 1 })).rows);
say((await db.query({ table: "calls", group_by: ["e"], measures: { n: "count()" }, order_by: ["e"] })).rows);
say((await db.sql("select sum(n) as n from scores where id > $low", { parameters: { low: 1 } })).rows);
const wide = (await db.rows("wide")).rows;
say([wide, (await db.sql("select n from wide")).rows, wide.map(({ n }) => String(BigInt(n as number | string) + 1n))]);
for await (const { rows } of db.live({ table: "wide" })) {
  say(rows);
  break;
}
try {
  await db.rows("nothing");
} catch (error) {
  say(error instanceof KiviError ? [error.status, error.reason] : String(error));
}
const stop = new AbortController();
for await (const { snapshot, rows } of db.live({ table: "scores", order_by: "-n", limit: 3 }, stop.signal)) {
  say([snapshot, rows]);
  if (rows[0]?.n === 1000) stop.abort();
}
let seen = 0;
for await (const { events } of db.events({ table: "calls" })) {
  for (const event of events) seen += event.us as number;
  if (events.some((event) => event.e === 99)) break;
}
say([seen, db.minSnapshot > 0]);
"""
WRONG = """
import { Kivi } from "./index.js";
void new Kivi("").rows("t", { limits: 1 });
void new Kivi("").live({});
"""


def test_it_is_made_from_the_routes_as_they_are() -> None:
    spec = importlib.util.spec_from_file_location("generate", CLIENT / "generate.py")
    assert spec is not None and spec.loader is not None
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TARGET.read_text() == generate.text(), "python clients/typescript/generate.py"


def compiled(folder: Path, name: str, program: str) -> subprocess.CompletedProcess[str]:
    """The client and a program that uses it, in ``folder``."""
    sources = folder / name
    sources.mkdir()
    for source in (CLIENT / "src").iterdir():
        (sources / source.name).write_text(source.read_text())
    (sources / "program.ts").write_text(program)
    (sources / "node.d.ts").write_text("declare const process: { argv: string[] };\n")
    (sources / "package.json").write_text('{"type": "module"}')
    settings = json.loads((CLIENT / "tsconfig.json").read_text())
    settings["include"] = ["*.ts"]
    settings["compilerOptions"] |= {"module": "es2022", "outDir": "out"}
    (sources / "tsconfig.json").write_text(json.dumps(settings))
    return subprocess.run([require("tsc")], cwd=sources, capture_output=True, text=True)


@pytest.mark.story
def test_it_reads_and_follows_what_the_store_says_over_a_kill(tmp_path: Path) -> None:
    node = require("node")
    done = compiled(tmp_path, "right", PROGRAM)
    assert done.returncode == 0, done.stdout
    refused = compiled(tmp_path, "wrong", WRONG).stdout
    assert "'limits' does not exist in type 'RowsQuery'" in refused and "Property 'table' is missing" in refused

    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_table("scores", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
            db.create_event_table("calls", event_time="ts", columns={"e": "int64", "ts": "timestamp", "us": "int64"})
            db.create_table("wide", key={"id": "int64"}, columns={"n": "int64"})
            with db.transaction() as tx:
                for i in range(5):
                    tx.delta("scores", (i,), n=i)
                for i in range(2):
                    tx.put("wide", (2**53 - 1 + i,), n=-(2**53) + 1 - i)
            db.append("calls", [{"e": i % 2, "ts": i, "us": i} for i in range(10)])
        address = base(server)
        server.arguments[1] = address.removeprefix("http://").rstrip("/")  # the same port again
        command = [node, "out/program.js", address]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=tmp_path / "right", **pipes) as program:
            timer = threading.Timer(240, program.kill)
            timer.start()
            try:
                assert program.stdout is not None and program.stderr is not None
                lines = iter(json.loads(line) for line in program.stdout)
                assert sorted(next(lines)) == ["calls", "scores", "wide"]
                assert next(lines) == "row"
                assert next(lines) == [{"id": 2, "n": 2}]
                assert next(lines) == [{"id": 4, "n": 4}]
                assert next(lines) == [{"e": 0, "n": 5}, {"e": 1, "n": 5}]
                assert next(lines) == [{"n": 9}]  # in Arrow a decimal of 38 digits, and a whole number
                least, beyond = 2**53 - 1, str(2**53)  # beyond what numbers hold, texts
                wide: list[dict[str, Any]] = [{"id": least, "n": -least}, {"id": beyond, "n": f"-{beyond}"}]
                assert next(lines) == [wide, [{"n": row["n"]} for row in wide], [str(1 - least), str(1 - 2**53)]]
                assert next(lines) == wide
                assert next(lines) == [404, "NotFound"]
                snapshot, rows = next(lines)
                assert [(row["id"], row["n"]) for row in rows] == [(4, 4), (3, 3), (2, 2)]
                states = {snapshot: rows}
                for step in range(10):
                    if step == 5:
                        server.restart()
                    with server.connect() as db, db.transaction() as tx:
                        tx.delta("scores", (step % 5,), n=3)
                with server.connect() as db:
                    db.append("calls", [{"e": 99, "ts": 99, "us": 1_000}])
                    with db.transaction() as tx:
                        tx.delta("scores", (0,), n=1_000 - db.get("scores", (0,))["n"])
                for said in lines:
                    if len(said) == 2 and isinstance(said[1], list):
                        states[said[0]] = said[1]
                    else:
                        break
                assert said == [sum(range(10)) + 1_000, True]
                assert len(states) > 1 and states[max(states)][0] == {"id": 0, "n": 1_000}
                with server.connect() as db:
                    for ts, found in states.items():  # each is what the query gives at the snapshot that it names
                        with db.snapshot(as_of=ts) as snap:
                            rows = sorted(snap.scan("scores"), key=lambda row: -row["n"])[:3]
                            assert [dict(row) for row in rows] == found or {row["n"] for row in rows} == {
                                f["n"] for f in found
                            }
                assert program.wait(60) == 0, program.stderr.read()
            finally:
                timer.cancel()
                program.kill()
