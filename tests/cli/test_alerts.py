"""``kivi alerts`` and ``kivi silence``, against a server."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

import kivi
from kivi.cli import main
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

BEGIN = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def test_alerts_are_listed_and_silenced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect() as db:
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "ep": "string"})
        db.create_aggregate(
            "ep_5m", source="calls", group_by=["ep", kivi.time_slot("ts", "5m")], measures={"n": kivi.count()}
        )
        db.append("calls", [{"ts": BEGIN, "ep": "/cart"}])
        db.create_alert("busy", on="ep_5m", where=kivi.col("n") > 1, for_="2m")

        def said(*arguments: str) -> str:
            assert main([*arguments, "--endpoint", server.endpoint]) == 0
            return capsys.readouterr().out

        assert said("alerts").splitlines()[2].split() == ["busy", "inactive"]
        db.append("calls", [{"ts": BEGIN, "ep": "/cart"}, {"ts": BEGIN + dt.timedelta(minutes=8), "ep": "/"}])
        wait_until(lambda: db.alerts()[0]["state"] == "firing")
        assert said("alerts").splitlines()[2].split()[:5] == [
            "busy", "firing", 'ep="/cart"', "2026-01-01T12:07:00Z", "n=2",
        ]  # fmt: skip
        said("silence", "busy", "2h")
        (one,) = map(json.loads, said("alerts", "-o", "json").splitlines())
        until = dt.datetime.fromisoformat(one["silenced_until"])
        assert dt.timedelta(minutes=119) < until - dt.datetime.now(dt.UTC) < dt.timedelta(hours=2)
        assert (one["key"], one["value"], one["on"]) == ({"ep": "/cart"}, {"n": 2}, "ep_5m")
        said("silence", "busy", "now")
        assert db.alerts()[0]["silenced_until"] is None
        for wrong in ("9999999d", str(2**62), "99999-01-01T00:00:00Z"):
            assert main(["silence", "busy", wrong, "--endpoint", server.endpoint]) == 1
            assert "kivi: " in capsys.readouterr().err
        assert db.alerts()[0]["silenced_until"] is None
        assert main(["silence", "idle", "2h", "--endpoint", server.endpoint]) == 1
        assert "there is no alert 'idle'" in capsys.readouterr().err
