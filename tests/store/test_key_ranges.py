"""A predicate on key columns reads a range of keys, and selects the rows that it would without one."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import kivi
from kivi.model.expressions import Expr

COMPARED: list[Callable[[Any, Any], Any]] = [
    operator.gt,
    operator.ge,
    operator.lt,
    operator.le,
    operator.eq,
    operator.ne,
]


def test_random_predicates_on_keys_select_what_brute_force_does() -> None:
    rng = random.Random(1)
    with kivi.open(background=False) as db:
        db.create_table("t", key={"a": "int64", "b": "string"}, columns={"v": "int64"})
        with db.transaction() as tx:
            for a in range(-3, 8):
                for b in ("", "x", "x\0", "xy", "\U0010ffff"):
                    tx.put("t", (a, b), v=a)
        for consolidated in (False, True):
            if consolidated:
                db.consolidate()
            with db.snapshot() as snap:
                rows = list(snap.scan("t"))
                for _ in range(150):
                    terms, holds = zip(*[term(rng) for _ in range(rng.randint(1, 3))], strict=True)
                    where: Expr = terms[0]
                    for each in terms[1:]:
                        where = where & each
                    prefix = rng.choice([(), (), (3,)])
                    found = list(snap.scan("t", where=where, reverse=rng.random() < 0.2, prefix=prefix))
                    inside = [row for row in rows if not prefix or row["a"] == prefix[0]]
                    wanted = [row for row in inside if all(hold(row) for hold in holds)]
                    assert sorted(map(str, found)) == sorted(map(str, wanted)), where


def term(rng: random.Random) -> tuple[Expr, Callable[[dict[str, Any]], bool]]:
    name = rng.choice(["a", "b", "v"])
    texts = ["", "w", "x", "x\0", "xx", "xy", "\U0010ffff"]
    values = [rng.choice(texts) if name == "b" else rng.randrange(-5, 14) for _ in range(2)]
    if rng.random() < 0.25:
        return kivi.col(name).isin(values), lambda row: row[name] in values
    if name == "b" and rng.random() < 0.4:
        text = str(values[0])
        if rng.random() < 0.5:
            return kivi.col(name).startswith(text), lambda row: row[name].startswith(text)
        return kivi.col(name).matches(f"^{text}x?$"), lambda row: row[name] in (text, text + "x")
    compare = rng.choice(COMPARED)
    return compare(kivi.col(name), values[0]), lambda row: bool(compare(row[name], values[0]))
