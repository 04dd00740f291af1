"""Value expressions: the same on rows as on Arrow columns, exact, and an error in the same rows.

The model evaluates a bound expression with fractions, in four values: true or a value, false, unknown (None), out of
range. Both evaluators are compared with it on random expressions and rows.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import math
import operator
import re
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kivi
from kivi.arrow.columns import arrow_type, stored_column, stored_rows
from kivi.arrow.predicates import evaluate, filter_batch, mask
from kivi.errors import InvalidArgument, OutOfRange, SchemaError
from kivi.model import predicate_text
from kivi.model.expressions import (
    TEXT,
    TIME_PARTS,
    Expr,
    bind,
    bind_value,
    bounds_of,
    from_plain,
    lit,
    matches,
    names,
    to_plain,
    value_of,
)
from kivi.model.expressions.positions import is_within
from kivi.model.expressions.quads import quad_of
from kivi.model.expressions.texts import literal_prefix
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType
from kivi.wire.codec import from_expr, to_expr
from kivi.wire.v1 import types_pb2

col, case, coalesce = kivi.col, kivi.case, kivi.coalesce
PATTERNS = ["", "a", "^a", "^é?$", "a|^$", "^(a|b)\\.?", "[^a]", "^aé*"]
CIRCLES = [(0.0, 0.0, 60.0), (-0.5, 2.0, 0.0), (89.0, 170.0, 500.0), (0.0, 359.5, 20_000.0)]
TYPES = {
    name: ColumnType.parse(text)
    for name, text in {
        "i": "int64", "j": "int64", "f": "float64", "g": "float64", "d": "decimal(5,2)", "e": "decimal(18,4)",
        "t": "timestamp", "u": "timestamp", "s": "string", "y": "bytes", "b": "bool",
    }.items()
}  # fmt: skip


def type_of(name: str) -> ColumnType:
    if name not in TYPES:
        raise SchemaError(f"no column {name!r}")
    return TYPES[name]


INTEGERS = st.sampled_from([INT64_MIN, INT64_MIN + 1, -(10**18), -3, -1, 0, 1, 2, 7, 2**53 + 1, 2**62, INT64_MAX])
FLOATS = st.sampled_from([0.0, 0.01, 0.1, -0.5, 0.5, 2.5, 5e-324, 1e-300, 1e300, -1e308, 2.0**53, 2.0**63, -(2.0**63)])
NARROW = st.sampled_from([-99_999, -50, -1, 0, 1, 10, 250, 99_999])
WIDE = st.sampled_from([-(10**18) + 1, -5_000, 0, 1, 100, 1_000, 25_000, 10**17, 10**18 - 1])
OF: dict[str, st.SearchStrategy[Any]] = {
    "i": INTEGERS, "j": INTEGERS, "f": FLOATS, "g": FLOATS, "d": NARROW, "e": WIDE, "t": INTEGERS, "u": INTEGERS,
    "s": st.sampled_from(["", "a", "é", "aé", "ba."]), "y": st.sampled_from([b"", b"a"]), "b": st.booleans(),
}  # fmt: skip
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | of for name, of in OF.items()}), min_size=1, max_size=4)

# -- random expressions -----------------------------------------------------------------------------

COMPARE: dict[str, Any] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
CALCULATE: dict[str, Any] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
LITERALS = st.integers(-3, 3) | st.sampled_from([10**17, 0.5, Decimal("0.5"), Decimal("-1.0001")])
KINDS = [("i", "j", "f", "g", "d", "e"), ("t", "u"), ("s",), ("y",), ("b",)]


@st.composite
def values(draw: st.DrawFn, kind: int = 0, depth: int = 2) -> Any:
    """A value expression of one kind of types."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return col(draw(st.sampled_from(KINDS[kind])))
    inner = values(kind, depth - 1)
    shape = draw(st.sampled_from("ncdo" if kind else "nncdol"))
    if shape == "c":
        return coalesce(*draw(st.lists(inner, min_size=1, max_size=3)))
    if shape == "d":
        pairs = draw(st.lists(st.tuples(predicates(depth - 1), inner), min_size=1, max_size=2))
        return case(*pairs, otherwise=draw(st.none() | inner))
    if shape == "o" and kind == 4:
        return case((draw(predicates(depth - 1)), True), otherwise=False)
    if kind == 1:
        return draw(inner) + draw(st.integers(-5, 5)) * draw(st.sampled_from([col("i"), col("t") - col("u")]))
    if kind == 2 and shape == "n" and draw(st.integers(0, 3)) == 0:
        return kivi.quad(draw(values(0, 0)), draw(values(0, 0)), draw(st.sampled_from([1, 7, 24])))
    if kind:
        return draw(inner)
    if shape == "n" and draw(st.integers(0, 5)) == 0:
        return getattr(draw(values(1, depth - 1)), draw(st.sampled_from(TIME_PARTS)))()
    left, right = draw(inner), draw(inner | LITERALS if shape == "l" else inner)
    if shape == "o":
        return -left
    op = draw(st.sampled_from(list(CALCULATE)))
    return CALCULATE[op](right, left) if draw(st.booleans()) else CALCULATE[op](left, right)


@st.composite
def predicates(draw: st.DrawFn, depth: int = 3) -> Any:
    kind = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4]))
    inner = values(kind, max(0, depth - 1))
    shape = draw(st.sampled_from("cccitwao~")) if depth else "c"
    if shape == "t":
        of, method = draw(values(2, depth - 1)), draw(st.sampled_from(sorted(TEXT)))
        return getattr(of, method)(draw(st.sampled_from(PATTERNS if method == "matches" else ["", "a", "é", "aé"])))
    if shape == "w":
        return kivi.within_km(draw(values(0, 1)), draw(values(0, 1)), *draw(st.sampled_from(CIRCLES)))
    if shape == "i":
        return draw(inner).is_null()
    if shape == "~":
        return ~draw(predicates(depth - 1))
    if shape in "ao":
        left, right = draw(predicates(depth - 1)), draw(predicates(depth - 1))
        return left & right if shape == "a" else left | right
    return COMPARE[draw(st.sampled_from(list(COMPARE)))](draw(inner), draw(inner))


# -- the model --------------------------------------------------------------------------------------

ERROR = "out of range"


def as_number(value: Any, type_: ColumnType) -> Any:
    """A stored value as the number it stands for."""
    return Fraction(value, 10**type_.scale) if type_.name in ("int64", "decimal", "timestamp") else value


def as_float(value: Any, type_: ColumnType) -> float:
    return value if type_.name == "float64" else float(int(value * 10**type_.scale)) / 10**type_.scale


def held(value: Any, type_: ColumnType) -> Any:
    if type_.name == "float64":
        return value + 0.0 if math.isfinite(value) else ERROR
    unscaled = value * 10**type_.scale
    assert unscaled.denominator == 1
    return value if type_.stored_min <= unscaled <= type_.stored_max else ERROR


def has(op: str, text: str, value: str) -> bool:
    match op:
        case "startswith":
            return text[: len(value)] == value
        case "contains":
            return text.find(value) >= 0
    return re.search(value.replace("$", r"\Z"), text) is not None


def part(name: str, moment: int) -> int:
    """By Python's calendar, which has the same days in every 400 years."""
    turns, rest = divmod(moment, 146_097 * 86_400_000_000)
    there = dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=rest)  # noqa: DTZ001
    if name == "weekday":
        return there.weekday()
    return int(getattr(there, name)) + (400 * turns if name == "year" else 0)


def model(expr: Expr, row: dict[str, Any]) -> Any:
    if expr.column:
        value = row[expr.column]
        if expr.op == "is_null":
            return value is None
        if value is None:
            return None
        if expr.op in TEXT:
            return has(expr.op, value, expr.value)
        if expr.op == "col":
            return as_number(value, TYPES[expr.column])
        return COMPARE[expr.op](value, expr.value)
    if expr.op == "lit":
        return expr.value if expr.value is None or expr.type is None else as_number(expr.value, expr.type)
    args = [model(arg, row) for arg in expr.args]
    if expr.op in ("and", "or"):
        decides = expr.op == "or"
        return next((truth for truth in (decides, ERROR, None) if any(arg is truth for arg in args)), not decides)
    if expr.op in ("coalesce", "case"):
        if expr.op == "coalesce":
            at = next((i for i, value in enumerate(args) if value is not None), 0)
        else:
            at = next((i + 1 for i, truth in enumerate(args[:-1:2]) for i in [2 * i] if truth is ERROR or truth), -1)
            if at > 0 and args[at - 1] is ERROR:
                return ERROR
        value, of = args[at], expr.args[at].type
        if value is None or value is ERROR or expr.type is None or of is None:
            return value
        value = as_float(value, of) if expr.type.name == "float64" else value
        return held(value, expr.type) if expr.type.name == "decimal" and expr.type != of else value
    if ERROR in args:
        return ERROR
    if expr.op == "is_null":
        return args[0] is None
    if None in args:
        return None
    if expr.op == "not":
        return not args[0]
    if expr.op in TEXT:
        return has(expr.op, args[0], expr.value)
    if expr.op == "part":
        return part(expr.value[0], int(args[0]))
    if expr.op in ("within_km", "quad"):
        lat, lon = (as_float(value, arg.type) for value, arg in zip(args, expr.args, strict=True) if arg.type)
        found = is_within(lat, lon, expr.value) if expr.op == "within_km" else quad_of(lat, lon, *expr.value)
        return found  # whether that is right is tested below
    if expr.op in COMPARE:
        exact = [Fraction(value) if type(value) is float else value for value in args]
        return COMPARE[expr.op](*exact)
    assert expr.type is not None
    if expr.type.name == "float64":
        args = [as_float(value, arg.type) for value, arg in zip(args, expr.args, strict=True) if arg.type]
    if expr.op == "neg":
        return held(-args[0], expr.type)
    if expr.op == "/" and args[1] == 0:
        return None
    return held(CALCULATE[expr.op](*args), expr.type)


def bound(expr: Expr) -> tuple[Expr, ColumnType]:
    try:
        return bind_value(expr, type_of)
    except (SchemaError, OutOfRange):  # too many digits, or out of range whatever the row: tested below
        assume(False)
        raise


def batch_of(rows: list[dict[str, Any]]) -> Any:
    return pa.RecordBatch.from_arrays(
        [stored_column(type_, [row[name] for row in rows]) for name, type_ in TYPES.items()], list(TYPES)
    )


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except OutOfRange:
        return ERROR


def check(expr: Expr, rows: list[dict[str, Any]]) -> None:
    node, type_ = bound(expr)
    expected = [model(node, row) for row in rows]
    numbers = [outcome(value_of, node, row) for row in rows]
    assert [v if v in (None, ERROR) else as_number(v, type_) for v in numbers] == expected, str(node)
    found = outcome(evaluate, batch_of(rows), node, TYPES)
    if ERROR in expected:
        assert found is ERROR, str(node)
        rows = [row for row, value in zip(rows, expected, strict=True) if value is not ERROR]
        found = evaluate(batch_of(rows), node, TYPES)
    assert found.type == arrow_type(type_)
    stored = [row["x"] for row in stored_rows(pa.RecordBatch.from_arrays([found], ["x"]))]
    assert stored == [value for value in numbers if value is not ERROR], str(node)
    assert all(math.copysign(1, value) == 1 for value in stored if type(value) is float and value == 0)
    # By way of the wire and of the catalog it is the same expression.
    for sent in (
        from_expr(types_pb2.Expr.FromString(to_expr(node).SerializeToString())),
        from_plain(json.loads(json.dumps(to_plain(node)))),
    ):
        assert str(bind_value(sent, type_of, lambda _, value, __: value)[0]) == str(node)
    assert str(bind_value(from_plain(to_plain(expr)), type_of)[0]) == str(node)
    assert names(node) <= names(expr)


@given(values(), ROWS)
def test_numbers(expr: Expr, rows: list[dict[str, Any]]) -> None:
    check(expr, rows)


@given(st.integers(1, 4).flatmap(values), ROWS)
def test_values_of_other_types(expr: Expr, rows: list[dict[str, Any]]) -> None:
    check(expr, rows)


@given(predicates(), ROWS)
def test_predicates(expr: Expr, rows: list[dict[str, Any]]) -> None:
    check(expr, rows)
    node = bind(expr, type_of)
    rows = [row for row in rows if model(node, row) is not ERROR]
    truths = [model(node, row) for row in rows]
    assert mask(batch_of(rows), node, TYPES).to_pylist() == truths
    assert [matches(node, row) for row in rows] == [truth is True for truth in truths]
    assert filter_batch(batch_of(rows), node, TYPES).num_rows == truths.count(True)


@given(
    st.sampled_from(["Europe/Paris", "Asia/Kathmandu", "America/St_Johns", "UTC"]),
    st.sampled_from(TIME_PARTS),
    st.data(),
)
def test_parts_in_a_zone_are_those_of_its_clock(zone: str, name: str, data: st.DataObject) -> None:
    moments = st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(2299, 1, 1), timezones=st.just(dt.UTC))  # noqa: DTZ001
    there = data.draw(moments)
    clock = there.astimezone(zoneinfo.ZoneInfo(zone))
    wanted = clock.weekday() if name == "weekday" else getattr(clock, name)
    assert both(getattr(col("t"), name)(tz=zone), t=ColumnType("timestamp").to_stored(there)) == wanted


LATITUDES, LONGITUDES = st.floats(-90, 90), st.floats(-360, 360)


@given(LATITUDES, LONGITUDES, LATITUDES, LONGITUDES, st.floats(0, 20_015) | st.just(0.0), st.data())
def test_a_circle_has_what_lies_within_it_and_its_bounds_have_the_circle(
    lat: float, lon: float, at_lat: float, at_lon: float, km: float, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):  # near its edge
        lat, lon = at_lat, at_lon + data.draw(st.floats(0.5, 1.5)) * km / 111.195
    assume(abs(lon) <= 360)
    a, b = (
        tuple(map(math.prod, ((math.cos(y), math.cos(x)), (math.cos(y), math.sin(x)), (math.sin(y), 1))))
        for y, x in ((math.radians(lat), math.radians(lon)), (math.radians(at_lat), math.radians(at_lon)))
    )
    distance = 2 * math.asin(min(1.0, math.dist(a, b) / 2)) * 6371.0088
    where = kivi.within_km("f", "g", at_lat, at_lon, km)
    found = both(where, f=lat, g=lon)
    if abs(distance - km) > 1e-3:  # chords of nearly half a turn say no more
        assert found is (distance < km)
    if found:
        bounds = bounds_of(bind(where, type_of))
        assert bounds and all(matches(bound, {"f": lat, "g": lon}) for bound in bounds)
    assert both(kivi.within_km("f", "g", lat, lon, 0), f=lat, g=lon) is True


@given(
    LATITUDES | st.sampled_from([-90.0, 0.0, 90.0]),
    LONGITUDES | st.sampled_from([-360.0, -180.0, 0.0, 180.0]),
    st.data(),
)
def test_a_quad_is_the_quarter_of_a_quarter(lat: float, lon: float, data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 24))
    path = both(kivi.quad("f", "g", depth=depth), f=lat, g=lon)
    north, west, height, width = 90.0, -180.0, 180.0, 360.0
    for digit in map(int, path):
        height, width = height / 2, width / 2
        north, west = north - height * (digit // 2), west + width * (digit % 2)
    at = (lon + 180.0) % 360.0 - 180.0
    assert north - height - 1e-9 <= lat <= north + 1e-9 and west - 1e-9 <= at <= west + width + 1e-9
    cell = path[: data.draw(st.integers(0, depth))]
    for where in (kivi.quad("f", "g", depth=depth).under(cell), kivi.quad("f", "g", depth=depth).covers(path + "12")):
        assert both(where, f=lat, g=lon) is True
        assert all(matches(bound, {"f": lat, "g": lon}) for bound in bounds_of(bind(where, type_of)))
    other = cell[:-1] + str((int(cell[-1]) + 1) % 4) if cell else "4"
    if cell:
        assert both(kivi.quad("f", "g", depth=depth).under(other), f=lat, g=lon) is False
    else:
        with pytest.raises(InvalidArgument):
            kivi.quad("f", "g").under(other)


@pytest.mark.parametrize(("lat", "lon"), [(90.001, 0.0), (0.0, -360.5), (None, 0.0), (0.0, None)])
def test_what_is_no_position_is_unknown(lat: float | None, lon: float | None) -> None:
    assert both(kivi.within_km("f", "g", 0, 0, 30_000), f=lat, g=lon) is None
    assert both(kivi.quad("f", "g"), f=lat, g=lon) is None


@given(
    st.text("ab|()^.é\U0010ffff\ud7ff", max_size=4),
    st.sampled_from(["startswith", "matches"]),
    st.text("abé\ud7ff\ue000\U0010ffff"),
)
def test_bounds_of_texts_hold_wherever_the_predicate_does(value: str, op: str, text: str) -> None:
    try:
        where = bind(getattr(col("s"), op)("^" + value if op == "matches" else value), type_of)
    except InvalidArgument:
        return
    within = all(matches(bound, {"s": text}) for bound in bounds_of(where))
    if matches(where, {"s": text}):
        assert within
    elif op == "startswith":
        assert not within
    assert matches(where, {"s": text}) == both(getattr(col("s"), op)(where.value), s=text)


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [("^/v1/", "/v1/"), ("^ab*", "a"), ("^ab{2}", "a"), ("^ab+", "ab"), ("^a(b|c)", "a"), ("^a|b", ""),
     ("a", ""), ("^a\\Q(\\E|x", ""),
     ("^a[(]|x", ""), ("^*a", ""), ("(?m)^a", "")],
)  # fmt: skip
def test_a_pattern_says_what_texts_begin_with(pattern: str, prefix: str) -> None:
    assert literal_prefix(pattern) == prefix


def test_patterns_are_those_of_re2() -> None:
    for pattern in ("(", r"(a)\1", "(?=a)", "a{2000}", "a" * 1_001, "\ud800"):
        with pytest.raises(InvalidArgument):
            bind(col("s").matches(pattern), type_of)
    assert both(col("s").matches("(a*)*b$"), s="a" * 50_000) is False  # which takes a backtracking engine for ever
    assert both(col("s").matches("^b$"), s="a\nb") is False
    assert both(col("s").matches("(?m)^b$"), s="a\nb") is True
    assert both(col("y").startswith(b"\0"), y=b"\0a") is True
    numbers, text, moment = col("i"), col("s"), col("t")
    nothing: Any = None
    for expr in (numbers.startswith("a"), col("y").matches("a"), text.startswith(b"a"), text.contains(nothing)):
        with pytest.raises(SchemaError):
            bind_value(expr, type_of)
    for value in (numbers.hour(), kivi.within_km("s", "f", 0, 0, 1), moment.hour("Nowhere/Else")):
        with pytest.raises(SchemaError):
            bind_value(value, type_of)
    circles: list[Any] = [(91, 0, 1), (0, 0, -1), (0, "0", 1), (0, 0, math.inf)]
    for expr in (
        *(kivi.within_km("f", "g", *circle) for circle in circles),
        Expr("within_km", value=(), args=(col("f"), col("g"))),
        Expr("part", value=("age", ""), args=(moment,)),
    ):
        with pytest.raises(InvalidArgument):
            bind_value(expr, type_of)


@given(
    st.integers(-(10**18) + 1, 10**18 - 1) | st.integers(-300, 300),
    st.integers(0, 18),
    st.integers(-3, 3),
    st.sampled_from(list(COMPARE)),
)
def test_decimals_beside_floats_are_compared_exactly(unscaled: int, scale: int, steps: int, op: str) -> None:
    """At the nearest float, and some floats beside it."""
    number = unscaled / 10**scale
    for _ in range(abs(steps)):
        number = math.nextafter(number, math.inf if steps > 0 else -math.inf)
    types = {"a": ColumnType("decimal", 18, scale), "f": ColumnType("float64")}
    batch = pa.RecordBatch.from_arrays(
        [stored_column(t, [v]) for t, v in zip(types.values(), (unscaled, number), strict=True)], ["a", "f"]
    )
    for expr, wanted in (
        (COMPARE[op](col("a"), col("f")), COMPARE[op](Fraction(unscaled, 10**scale), Fraction(number))),
        (COMPARE[op](col("f"), col("a")), COMPARE[op](Fraction(number), Fraction(unscaled, 10**scale))),
    ):
        node = bind(expr, types.__getitem__)
        assert matches(node, {"a": unscaled, "f": number}) == wanted
        assert mask(batch, node, types).to_pylist() == [wanted]


# -- what the module says, one by one -----------------------------------------------------------------

BIG = 10**17  # of int64; decimal(18, 2) ends before it
NULLS: dict[str, Any] = dict.fromkeys(TYPES)
MOMENT = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)


def both(expr: Expr, **row: Any) -> Any:
    """The value by both evaluators, which agree."""
    node, _ = bind_value(expr, type_of)
    there = NULLS | row
    value, column = outcome(value_of, node, there), outcome(evaluate, batch_of([there]), node, TYPES)
    if column is not ERROR:
        column = stored_rows(pa.RecordBatch.from_arrays([column], ["x"]))[0]["x"]
    assert column == value and type(column) is type(value)
    return value


@pytest.mark.parametrize(
    ("expr", "type_name"),
    [
        (col("i") + col("j"), "int64"),
        (col("i") / col("j"), "float64"),
        (col("i") - col("f"), "float64"),
        (col("d") + col("e"), "decimal(18,4)"),
        (col("d") * col("e"), "decimal(18,6)"),
        (col("d") * col("i"), "decimal(18,2)"),
        (col("d") * Decimal("0.125"), "decimal(18,5)"),
        (col("i") + Decimal("1.50"), "decimal(18,1)"),
        (col("f") * Decimal("0.1"), "float64"),
        (col("d") / 2, "float64"),
        (-col("d"), "decimal(5,2)"),
        (col("t") - col("u"), "int64"),
        (col("t") - MOMENT, "int64"),
        (5 + col("t"), "timestamp"),
        (col("t") - dt.timedelta(seconds=1), "timestamp"),
        (coalesce(col("i"), col("d")), "decimal(18,2)"),
        (coalesce(col("d"), 0), "decimal(5,2)"),
        (coalesce(col("f"), 0), "float64"),
        (coalesce(col("i"), 0.5), "float64"),
        (coalesce(None, col("t"), MOMENT), "timestamp"),
        (case((col("b"), "x"), otherwise=col("s")), "string"),
        (case((col("b"), col("i") > 1)), "bool"),
        (col("i") > 1, "bool"),
        (lit(3) / 2, "float64"),
    ],
    ids=str,
)
def test_types(expr: Expr, type_name: str) -> None:
    assert str(bind_value(expr, type_of)[1]) == type_name


@pytest.mark.parametrize(
    "expr",
    [
        col("s") + "x", col("s") + col("s"), -col("b"), -col("t"), col("t") + col("u"), 1 - col("t"), col("t") * 2,
        col("t") / 2, col("b") + 1, col("i") == col("s"), col("t") < col("i"), col("b") == col("i"),
        coalesce(col("i"), "x"), coalesce(col("t"), col("i")), case((col("i"), 1)), coalesce(None), col("i") + None,
        col("i") * 2 == 1j, (col("i") + 1) < None, col("e") * col("e") * col("e") * col("e") * col("e"),
        (col("i") + 1).isin(["x"]), col("x") + 1, col("i") & col("b"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_meaning(expr: Expr) -> None:
    with pytest.raises(SchemaError):
        bind_value(expr, type_of)


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**63, Decimal("NaN"), Decimal("1e30"), Decimal("1e-30")])
def test_literals_that_no_column_holds(value: Any) -> None:
    for expr in (col("i") + value, coalesce(col("i"), value), (col("i") + 1) == value):
        with pytest.raises(InvalidArgument):
            bind_value(expr, type_of)


def test_arithmetic_is_exact_or_out_of_range() -> None:
    assert both(col("i") + col("j"), i=INT64_MAX - 1, j=1) == INT64_MAX
    for expr in (col("i") + 1, col("i") * 2, -(-col("i") - 1), col("i") - col("j")):
        assert both(expr, i=INT64_MAX, j=-1) is ERROR
    assert both(col("i") * col("d"), i=3, d=99_999) == 299_997
    assert both(col("d") * col("e"), d=10_000, e=10**12 - 1) == 10**16 - 10_000
    assert both(col("d") * col("e"), d=10_000, e=10**15) is ERROR
    assert both(col("i") + col("d"), i=BIG // 100, d=1) == BIG + 1
    assert both(col("i") + col("d"), i=BIG, d=0) is ERROR
    assert both(col("f") * 10, f=1e308) is ERROR
    assert both(col("t") + 1, t=INT64_MAX) is ERROR
    assert both(col("e") == Decimal("0.0001"), e=1) is True
    assert both(col("e") + 10**13, e=1) == 10**17 + 1


def test_null_and_zero() -> None:
    for expr in (col("i") + 1, col("i") / col("j"), -col("f"), col("i") * col("f")):
        assert both(expr, j=1) is None
    assert both(col("i") / col("j"), i=1, j=0) is None
    assert both(col("i") / 0, i=1) is None
    assert both(col("f") / col("g"), f=1e300, g=0.0) is None
    assert both((col("i") / col("j")).is_null(), i=1, j=0) is True
    assert both(col("i") / col("j"), i=1, j=4) == 0.25
    assert both(0 - col("f"), f=0.0) == 0.0
    assert both(col("i") + col("d"), i=INT64_MAX) is None  # bringing it to two digits alone is no error
    assert both(case((col("i") > 1, 1), otherwise=2)) == 2  # unknown is not true
    assert both(case((col("i") > 1, 1))) is None
    assert both(coalesce(col("i"), col("j"), 7), j=None) == 7


def test_comparisons_are_not_rounded() -> None:
    large = 2**53 + 1
    assert both(col("i") == col("f"), i=large, f=float(large)) is False
    assert both(col("i") > col("f"), i=large, f=float(large)) is True
    assert both(col("i") < col("f"), i=INT64_MAX, f=2.0**63) is True
    assert both(col("i") == col("f"), i=INT64_MIN, f=-(2.0**63)) is True
    assert both(col("d") == col("f"), d=10, f=0.1) is False  # the float is a little more
    assert both(col("d") < col("f"), d=10, f=0.1) is True
    assert both(col("d") == col("f"), d=50, f=0.5) is True
    assert both(col("i") == col("d"), i=3, d=300) is True
    assert both(col("i") > col("e"), i=INT64_MAX, e=10**18 - 1) is True
    assert both(col("d") == col("e"), d=1, e=100) is True


EXACT: dict[str, Any] = {
    "i": lambda stored: Fraction(stored), "f": Fraction, "d": lambda stored: Fraction(stored, 100),
    "e": lambda stored: Fraction(stored, 10_000),
}  # fmt: skip
NUMBERS = (
    INTEGERS | FLOATS | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([Decimal("0.1"), Decimal("0.5"), Decimal("0.01"), Decimal("-1.0001"), Decimal(2**53 + 1)])
    | st.decimals(-1000, 1000, places=4)
)  # fmt: skip


@given(st.sampled_from(sorted(EXACT)), st.sampled_from(sorted(COMPARE)), NUMBERS, st.data())
def test_a_literal_is_compared_exactly_or_refused(name: str, op: str, literal: Any, data: st.DataObject) -> None:
    """Whatever it stands beside, on either side: no comparison answers for another number than the one written."""
    stored = data.draw(OF[name])
    compare, exact, given_ = COMPARE[op], EXACT[name](stored), Fraction(literal)
    for value in (col(name), coalesce(col(name), col(name)), case((col("b"), col(name)))):
        for expr, wanted in (
            (compare(value, literal), compare(exact, given_)),
            (compare(lit(literal), value), compare(given_, exact)),
        ):
            try:
                found = both(expr, b=True, **{name: stored})
            except (InvalidArgument, SchemaError):
                assert value.op == "col" or isinstance(literal, Decimal)  # of 18 digits at most
                continue
            assert found is wanted
    with contextlib.suppress(InvalidArgument, SchemaError):
        assert both(col(name).isin([literal]), **{name: stored}) is (exact == given_)


def test_a_literal_in_a_text_is_of_the_kind_of_what_it_stands_beside() -> None:
    """0.1 beside a float is the float, and beside a decimal the decimal."""
    for text in ("f == 0.1", "f * 1 == 0.1", "0.1 == f * 1", "d == 0.1", "d + 0 == 0.1", "0.1 == d + 0"):
        expr = predicate_text.where(text, {name: str(type_) for name, type_ in TYPES.items()})
        assert both(expr, f=0.1, d=10) is True, text


def test_what_decides_hides_an_error() -> None:
    """In either order, so that a read that skips rows by one operand gives what one gives that does not."""
    error, false, unknown = col("i") * 2 > 0, col("j") > 5, col("f") > 0.0
    row = {"i": INT64_MAX, "j": 1}
    assert both(error & false, **row) is False and both(false & error, **row) is False
    assert both(error | ~false, **row) is True and both(~false | error, **row) is True
    for expr in (error | false, false | error, error & ~false, error & unknown, unknown | error, ~error):
        assert both(expr, **row) is ERROR
    assert both((col("i") * 2).is_null(), **row) is ERROR
    assert both((col("i") * 2).isin([]), **row) is ERROR
    assert both(case((col("j") > 5, col("i") * 2), otherwise=1), **row) == 1
    assert both(case((col("j") < 5, 3), (error, 4)), **row) == 3
    assert both(case((error, 4), otherwise=3), **row) is ERROR
    assert both(coalesce(col("j"), col("i") * 2), **row) == 1
    assert both(coalesce(col("f"), col("i") * 2.0, col("i") * 2), **row | {"i": 3}) == 6.0
    with pytest.raises(OutOfRange, match=r"\(i \* 2\) leaves the range of int64"):
        matches(bind(error, type_of), NULLS | row)


def test_what_has_no_columns_is_computed_once() -> None:
    assert bind(lit(1) == 1, type_of).value is True
    assert str(bind(col("i") > lit(60) * 1_000, type_of)) == "(i > 60000)"
    assert str(bind(col("d") > coalesce(None, Decimal("1.50")), type_of)) != ""
    node = bind(lit(1) > 2, type_of)
    assert filter_batch(batch_of([NULLS]), node, TYPES).num_rows == 0 and not matches(node, NULLS)
    assert mask(batch_of([NULLS] * 3), bind(lit(2) > 1, type_of), TYPES).to_pylist() == [True] * 3
    with pytest.raises(OutOfRange):
        bind(col("i") > lit(2**62) * 4, type_of)


def test_a_comparison_with_a_literal_is_one_node_however_it_is_written() -> None:
    for expr in (col("i") > 3, lit(3) < col("i"), col("i") > lit(1) + 2, 3 < col("i")):  # noqa: SIM300
        node = bind(expr, type_of)
        assert (node.op, node.column, node.value, node.args) == (">", "i", 3, ())
    assert (node := bind(col("b"), type_of)).op == "==" and node.value is True


@pytest.mark.parametrize(
    "data",
    [
        None, [], "x", 7, {}, ["col"], ["col", 1], ["lit"], ["lit", {"x": 1}], ["lit", 1, "int63"], ["=="], ["==", "a"],
        ["isin", "a", 3], ["+", None, ["col", "a"]], ["like", "a", 1], ["and"], ["not", ["col", "a"], ["col", "a"]],
        ["case", None, ["col", "a"], ["col", "b"]], ["lit", {"decimal": "x"}], ["lit", {"bytes": "*"}],
        ["lit", math.nan],
        ["lit", {"timestamp": "x"}], ["lit", {"timestamp": 10**30}], [["col", "a"]], ["coalesce", None, 3],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_plain_form_is_refused(data: Any) -> None:
    with pytest.raises(InvalidArgument):
        from_plain(data)


def test_every_literal_has_a_plain_form() -> None:
    for value in (None, True, 7, -1.5, "é", b"\0\xff", Decimal("1.50"), MOMENT):
        back = from_plain(json.loads(json.dumps(to_plain(lit(value)))))
        assert back.value == value and type(back.value) is type(value)
    with pytest.raises(InvalidArgument):
        to_plain(lit(object()))
    nested: list[Any] = ["col", "b"]
    for _ in range(2_000):
        nested = ["not", nested]
    with pytest.raises(InvalidArgument):
        from_plain(nested)


def test_a_strangers_expression_is_held_to_the_same_limits() -> None:
    deep = functools.reduce(lambda inner, _: inner + 1, range(50), col("i"))
    with pytest.raises(InvalidArgument, match="at most 10000 nodes and 50 deep"):
        bind(deep == 1, type_of)
    pb = types_pb2.Expr
    for message in (
        pb(op=pb.OP_LITERAL, type="int64"),
        pb(op=pb.OP_ADD, args=[pb(op=pb.OP_COLUMN, column="i")]),
        pb(op=pb.OP_CASE, args=[pb(op=pb.OP_COLUMN, column="b")] * 2),
        pb(op=pb.OP_COALESCE),
        pb(op=pb.OP_COLUMN),
        pb(op=99),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument):
            from_expr(message)
