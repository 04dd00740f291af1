"""Typed text: values, predicates, and what is printed."""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import io
import random
from decimal import Decimal
from typing import Any

import pytest

import kivi
from kivi.cli import text as cli_text
from kivi.cli.append import Rows
from kivi.model.declarations import event_table_schema
from kivi.model.expressions import Expr, bind, col
from kivi.model.predicate_text import expression, parse_value, where
from kivi.model.types import ColumnType

TYPES = {"id": "int64", "slot": "timestamp", "name": "string", "price": "decimal(9,2)", "b": "bytes", "f": "float64"}
MOMENT = dt.datetime(2023, 11, 16, 18, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id == 251 & slot >= '2023-11-16T18:00:00Z'", (kivi.col("id") == 251) & (kivi.col("slot") >= MOMENT)),
        ("id == 1 | id == 2", (kivi.col("id") == 1) | (kivi.col("id") == 2)),
        ("not name == 'a & b'", ~(kivi.col("name") == "a & b")),
        ("~(name == 'x')", ~(kivi.col("name") == "x")),
        ("5 < id", kivi.col("id") > 5),
        ("1 <= id < 9", (kivi.col("id") >= 1) & (kivi.col("id") < 9)),
        ("id in [1, 2]", kivi.col("id").isin([1, 2])),
        ("id not in (1, 2)", ~kivi.col("id").isin([1, 2])),
        ("name is null", kivi.col("name").is_null()),
        ("name != null", ~kivi.col("name").is_null()),
        ("price == 1.5", kivi.col("price") == Decimal("1.5")),
        ("f > -1.5", kivi.col("f") > -1.5),
        ("id * price > 100.5 & id >= f", ((col("id") * col("price")) > Decimal("100.5")) & (col("id") >= col("f"))),
        ("-(id + 1) == 2", -(col("id") + 1) == 2),
        ("1e30 * f < 3 / 2", 1e30 * col("f") < kivi.coalesce(3) / 2),
        ("slot - '2023-11-16T18:00:00Z' > 60", col("slot") - MOMENT > 60),
        ("coalesce(slot, '2023-11-16T18:00:00Z') is null", kivi.coalesce(col("slot"), MOMENT).is_null()),
        ("(id + 1) not in [1, 2]", ~(col("id") + 1).isin([1, 2])),
        (
            "name == case((id > 1, 'x'), (id < 0, 'y'), otherwise='z')",
            col("name") == kivi.case((col("id") > 1, "x"), (col("id") < 0, "y"), otherwise="z"),
        ),
        ("name.startswith('a') & ~name.contains('b')", col("name").startswith("a") & ~col("name").contains("b")),
        ("coalesce(name, 'x').matches('^x|y$')", kivi.coalesce(col("name"), "x").matches("^x|y$")),
        ("b.startswith('0x00')", col("b").startswith(b"\0")),
        ("slot.hour('Europe/Paris') >= 9", col("slot").hour(tz="Europe/Paris") >= 9),
        ("slot.weekday() in [5, 6]", col("slot").weekday().isin([5, 6])),
        ("within_km(f, price, 48.9, -2.4, 5)", kivi.within_km("f", "price", 48.9, -2.4, 5)),
        ("case((id > 1, null), otherwise=1) == 1", kivi.case((col("id") > 1, None), otherwise=1) == 1),
    ],
)
def test_where(text: str, expected: Expr) -> None:
    assert str(bound(where(text, TYPES))) == str(bound(expected))


def bound(expr: Expr) -> Expr:
    """Parentheses that say nothing are gone, and literals are as they will be compared."""
    return bind(expr, lambda name: ColumnType.parse(TYPES[name]))


def test_a_literal_has_every_character_that_it_is_written_with() -> None:
    """What Python calls a line may end at U+2028 and the like: a literal does not."""
    kept, refused = [], []
    for code in (*range(1, 0x3000), 0xFEFF, 0x1F600):
        if 0xD800 <= code < 0xE000 or chr(code) in "'\\":
            continue
        try:
            kept.append((where(f"s == 'a{chr(code)}b'", {"s": "string"}).value, f"a{chr(code)}b"))
        except kivi.InvalidArgument:
            refused.append(chr(code))
    assert [(found, meant) for found, meant in kept if found != meant] == []
    assert refused == ["\n", "\r"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "id ==",
        "nonsense == 1",
        "id == name",
        "id + 1",
        "id + name == 2",
        "id + nonsense == 2",
        "id ** 2 == 4",
        "id % 2 == 1",
        "coalesce() == 1",
        "case(id > 1, 2) == 1",
        "case((id > 1, 2), other=3) == 1",
        "min(id) == 1",
        "name.startswith(b)",
        "name.matches('(')",
        "name.lower() == 'a'",
        "slot.hour('Nowhere') == 1",
        "id.hour() == 1",
        "within_km(f, price, 48.9, 2.4)",
        "id < name + 'x'",
        "slot - 'yesterday' > 1",
        "not " * 2_000 + "id == 1",
        "id" + " + 1" * 2_000 + " == 1",
        "__import__('os').system('true')",
        "id == __import__('os')",
        "[x for x in 'a']",
        "lambda: 1",
        "(" * 500 + "id" + ")" * 500,
        "slot > 'yesterday'",
    ],
)
def test_what_is_no_predicate_is_refused(text: str) -> None:
    with pytest.raises(kivi.InvalidArgument):
        where(text, TYPES)


@pytest.mark.parametrize("read", [where, expression])
def test_a_quote_that_is_doubled_makes_no_other_text(read: Any) -> None:
    """In SQL it is a quote within the text; two texts side by side are one without it in Python."""
    for text in ("coalesce(name, 'O''Brien') == 'x'", "name == 'O' \"'Brien\""):
        with pytest.raises(kivi.InvalidArgument, match="two texts side by side: write a quote"):
            read(text, TYPES, "what")
    assert str(where(r"name == 'O\'Brien'", TYPES)) == str(kivi.col("name") == "O'Brien")


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [
        ("int64", "-5", -5),
        ("string", "null", None),
        ("string", "'null'", "null"),
        ("bool", "true", True),
        ("timestamp", "2023-11-16T18:00:00Z", MOMENT),
        ("timestamp", "2023-11-16T18:00:00", MOMENT),
        ("timestamp", "1700157600000000", 1_700_157_600_000_000),
        ("bytes", "0x00ff", b"\x00\xff"),
        ("decimal(9,2)", "1.50", Decimal("1.50")),
    ],
)
def test_values(type_name: str, text: str, value: object) -> None:
    assert parse_value(type_name, text) == value


@pytest.mark.parametrize(
    ("type_name", "text", "said"),
    [
        ("int64", "1_000", "not a int64"),
        ("float64", "1_000.5", "not a float64"),
        ("decimal(9,2)", "1_000", "not a decimal"),
        ("timestamp", "20260131", "write the day as 2026-01-31"),  # of 1970, taken for microseconds
    ],
)
def test_what_would_be_another_value_is_refused(type_name: str, text: str, said: str) -> None:
    with pytest.raises(kivi.InvalidArgument, match=said):
        parse_value(type_name, text)
    assert parse_value("timestamp", "20261301") == 20_261_301


@pytest.mark.parametrize("text", ["1767225600", "1767225600000"])
def test_times_to_ask_from_in_another_unit_are_refused(text: str) -> None:
    with pytest.raises(kivi.InvalidArgument, match="--end has .* whole numbers are microseconds"):
        cli_text.times_of(argparse.Namespace(start="2026-01-01", end=text))


def test_tables_csv_and_json() -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "name": "a,b", "at": MOMENT}, {"id": 20, "name": None, "at": None}]
    printed = {}
    for style in ("table", "csv", "json"):
        out = io.StringIO()
        cli_text.print_rows(rows, ["id", "name", "at"], style, out)
        printed[style] = out.getvalue().splitlines()
    assert printed["table"] == [
        "id  name  at",
        "--  ----  --------------------",
        " 1  a,b   2023-11-16T18:00:00Z",
        "20",
    ]
    assert printed["csv"] == ["id,name,at", '1,"a,b",2023-11-16T18:00:00Z', "20,,"]
    assert printed["json"][0] == '{"id": 1, "name": "a,b", "at": "2023-11-16T18:00:00Z"}'


def test_a_quoted_cell_of_csv_may_have_several_lines():
    schema = event_table_schema("ev", event_time="ts", columns={"ts": "timestamp", "a": "int64", "s": "string"})
    parse = Rows("csv", schema.description(), "f.csv")
    lines = ["a,s\n", '1,"x\n', '2,""y"""\n', "3,z\n"]
    assert [row for line in lines if (row := parse(line)) is not None] == [
        {"a": 1, "s": 'x\n2,"y"'},
        {"a": 3, "s": "z"},
    ]
    parse.end()
    parse('4,"open\n')
    with pytest.raises(kivi.InvalidArgument, match="line 5 inside a quoted cell of the record in line 5"):
        parse.end()


@pytest.mark.parametrize("seed", range(20))
def test_records_end_where_csv_says(seed: int) -> None:
    """Quotes are where they may be and where they may not: 5" pipe."""
    schema = event_table_schema("ev", event_time="ts", columns={"ts": "timestamp", "s": "string"})
    draw = random.Random(seed)
    for _ in range(200):
        text = "s\n" + "".join(draw.choice(['"', '"', "a", "\n", "\r\n", "\r"]) for _ in range(12)) + '\n5" pipe\n'
        parse, rows = Rows("csv", schema.description(), "f.csv"), []
        for line in io.StringIO(text, newline=""):
            row = parse(line)
            rows += [] if row is None else [row["s"] or ""]
        left = parse._open
        wanted = [row[0] for row in csv.reader(io.StringIO(text, newline="")) if row][1:]
        assert rows == (wanted[:-1] if left else wanted)
        if left:
            with pytest.raises(kivi.InvalidArgument, match="inside a quoted cell"):
                parse.end()


@pytest.mark.parametrize("line", ["[1]", "1", "{"])
def test_what_is_no_json_object_is_refused(line: str) -> None:
    schema = event_table_schema("ev", event_time="ts", columns={"ts": "timestamp", "s": "string"})
    parse = Rows("json", schema.description(), "f.json")
    with pytest.raises(kivi.InvalidArgument, match=r"f.json, line 1 is not a JSON object"):
        parse(line)


def test_texts_of_csv_are_what_they_are() -> None:
    schema = event_table_schema("ev", event_time="ts", columns={"ts": "timestamp", "s": "string", "n": "int64"})
    parse = Rows("csv", schema.description(), "f.csv")
    parse("s,n\n")
    for text in ("null", "'x'", '"x"', "''", " x "):
        assert parse('"' + text.replace('"', '""') + '",1\n') == {"s": text, "n": 1}
    assert parse(",null\n") == parse(',""\n') == {"s": None, "n": None}
    assert parse('"",\n') == {"s": "", "n": None}  # which no other text is written as
    assert parse('"a\n') is None and parse('b"",,c",""\n') == {"s": 'a\nb",,c', "n": None}


@pytest.mark.parametrize("seed", range(20))
def test_texts_and_nulls_are_read_as_they_were_written(seed: int) -> None:
    draw = random.Random(seed)
    types = dict.fromkeys("abc", "string")
    for _ in range(100):
        rows: list[dict[str, Any]] = [
            {name: draw.choice([None, "", "".join(draw.choices('",\r\n a\0\u2028', k=3))]) for name in types}
            for _ in range(3)
        ]
        out = io.StringIO(newline="")
        cli_text.print_rows(rows, list(types), "csv", out)
        parse = Rows("csv", {"key": {}, "columns": types}, "f.csv")
        lines = io.StringIO(out.getvalue(), newline="")
        assert [row for line in lines if (row := parse(line)) is not None] == rows


def test_a_cell_is_as_long_as_a_value_may_be() -> None:
    schema = event_table_schema("ev", event_time="ts", columns={"ts": "timestamp", "s": "string"})
    parse = Rows("csv", schema.description(), "f.csv")
    parse("s\n")
    assert parse("x" * 1_000_000 + "\n") == {"s": "x" * 1_000_000}
    with pytest.raises(kivi.InvalidArgument, match=r"f.csv, line 3: field larger than field limit"):
        parse("x" * (1 + (16 << 20)) + "\n")
