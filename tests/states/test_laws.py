"""R20: kivi's own measures hold the laws that registered ones are held to, and what breaks one is found and shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import kivi
from kivi.model.states import OWN
from kivi.states import own
from kivi.testing import check_measure

HUGE = 2**62
OURS: list[tuple[Any, dict[str, Any]]] = [
    (kivi.quantiles("x", 0.01), {}),
    (kivi.quantiles("x", 0.2), {"type": "float64"}),
    (kivi.distinct("x", 0.2), {"type": "string"}),
    (kivi.distinct("x", 0.05), {"type": "float64"}),
    (kivi.avg("x"), {"values": st.sampled_from([0, 1, -1, HUGE, -HUGE, 2**63 - 1, -(2**63)])}),
    (kivi.stddev("x"), {"type": "decimal"}),
    (kivi.var("x", population=True), {"type": "float64"}),
    (kivi.first("x"), {"type": "string"}),
    (kivi.last("x"), {"type": "bool"}),
    (kivi.argmax("x", by="y"), {"type": "bytes", "by": "float64"}),
    (kivi.argmin("x", by="y"), {"by": "timestamp"}),
    (kivi.weighted_quantiles("x", by="n"), {"by": "int64"}),
    (kivi.largest("x", 2), {"type": "float64"}),
    (kivi.smallest("x", 3), {}),
    (kivi.top("x", 1, most=2), {"type": "string"}),
    (kivi.top("x", 2, most=2), {"values": range(5)}),
]


@pytest.mark.parametrize(("measure", "options"), OURS, ids=[str(measure) for measure, _ in OURS])
def test_our_own_measures_hold_the_laws(measure: Any, options: dict[str, Any]) -> None:
    check_measure(measure, **options, examples=25)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``kivi.register_measure`` until the end of the test."""
    monkeypatch.setattr(own, "_registered", dict(own._registered))
    before = dict(OWN)
    yield kivi.register_measure
    OWN.clear()
    OWN.update(before)


PLAIN: dict[str, Any] = {
    "state": "<i8", "init": lambda v: v, "combine": lambda a, b: a | b, "evaluate": lambda s: s, "result": "int64",
    "takes": ["int64"],
}  # fmt: skip


def test_a_registered_measure_that_holds_them(register: Any) -> None:
    register("any_of", id=1_001, **PLAIN)
    check_measure("any_of", examples=25)
    check_measure("any_of", values=range(8), examples=25)
    state = [("n", "<i8"), ("most", "<i8")]

    def init(values: Any) -> Any:
        out = np.zeros(len(values), state)
        out["n"], out["most"] = 1, values
        return out

    def combine(a: Any, b: Any) -> Any:
        out = a.copy()
        out["n"], out["most"] = a["n"] + b["n"], np.maximum(a["most"], b["most"])
        return out

    register(
        "per_peak", id=1_002, state=state, init=init, combine=combine,
        evaluate=lambda s: s["most"] / s["n"], takes=["int64"],
    )  # fmt: skip
    check_measure(kivi.measure("per_peak", "x"), examples=25)


TWO = r"of the events \[-?\d in commit \d, -?\d in commit \d\] they are"


@pytest.mark.parametrize(
    ("changed", "law"),
    [
        ({"combine": lambda a, b: a}, TWO),
        ({"combine": lambda a, b: (a + b) // 2}, "of the events"),
        ({"state": "<f8", "init": lambda v: v / 3, "combine": lambda a, b: a + b}, "of the events"),
        ({"evaluate": lambda s: s + len(s)}, "a value changes with the states beside it"),
        ({"evaluate": lambda s: s[:1]}, "evaluate of 2 gave"),
        ({"init": lambda v: v.astype(np.int32)}, "init of"),
        ({"combine": lambda a, b: None}, "combine of"),
    ],
)
def test_what_breaks_a_law_is_shown(register: Any, changed: dict[str, Any], law: str) -> None:
    """By events that are as few as may be: where two are needed, there are two."""
    register("broken", id=1_003, **{**PLAIN, **changed})
    with pytest.raises(AssertionError, match=rf"broken\(value\): .*{law}"):
        check_measure("broken", values=range(-4, 5), examples=30)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(kivi.InvalidArgument, match="has no state"):
        check_measure(kivi.sum("x"))
    with pytest.raises(kivi.InvalidArgument, match="without an expression or where"):
        check_measure(kivi.avg(kivi.col("x") * 2))
    with pytest.raises(kivi.SchemaError, match="there is no measure 'nothing' here"):
        check_measure("nothing")
    with pytest.raises(kivi.SchemaError, match="quantiles observes int64, float64, decimal, not string"):
        check_measure(kivi.quantiles("x"), type="string")
