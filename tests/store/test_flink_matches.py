"""Matches equal those of Apache Flink's MATCH_RECOGNIZE.

It was run once; ``flink_matches.json`` has its version, the events, the statements, and the rows that it gave. Flink is
otherwise in two things: its WITHIN is exclusive, so there is one microsecond less here; and a quantifier takes no
row that would have to be given back, so ``A B? C`` where a row may be B and C gives other matches than SQL's preference
(under "otherwise", not compared), and where others repeat greedily the definitions leave no choice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kivi
from kivi.model.predicate_text import where

S = 1_000_000
T0 = 1_774_000_000 * S
COLUMNS = {"host": "int64", "n": "int64", "ts": "timestamp", "x": "int64"}


def test_matches_equal_those_of_flink_r26() -> None:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "flink_matches.json").read_text())
    events = [{"host": e["host"], "n": e["n"], "ts": T0 + e["s"] * S, "x": e["x"]} for e in found["events"]]
    with kivi.open() as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append("calls", events)
        with db.snapshot() as snap:
            for case in found["cases"]:
                names = sorted({letter for letter in case["pattern"] if letter.isalpha()})
                counts = {f"count_{name}": kivi.count(name) for name in names}
                asked = kivi.pattern(
                    case["pattern"],
                    partition_by=["host"],
                    within=case["within_s"] * S - 1 if case["within_s"] else None,
                    define={
                        name: where(text, {"x": "int64"}) for name, text in case["define"].items() if name in names
                    },
                    measures={"first": kivi.first(f"{names[0]}.n"), "last": kivi.last(f"{names[-1]}.n"), **counts},
                    skip=case["skip"],
                )
                matches = [list(row.values()) for row in snap.match("calls", asked)]
                assert sorted(matches) == sorted(case["rows"]), case["sql"]
