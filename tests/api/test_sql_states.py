"""No answer of SQL depends on the bytes of a state: what would look into them is refused, whatever it is called.

Statements are made up, with tables, aliases, subqueries and common table expressions that have a state's name, and
asked twice, of tables that differ in nothing but how the states are written down. Answers are equal, or both are
refused; and enough of each kind come out that the comparison says something.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from kivi.errors import InvalidArgument, KiviError, NotFound
from kivi.sql import Limits, answer, as_table
from tests.seeds import AT_NIGHT

pytest.importorskip("duckdb")
ROWS = 12
LIMITS = Limits(1 << 28, 1, 60.0, 100_000)


class Table(pa.dataset.Dataset):  # type: ignore[misc]
    """As ``kivi.api.dataset.Dataset``, without a store. Functions of its state are numbers of its rows."""

    failure = None
    files = ()

    def __init__(self, name: str, table: pa.Table, states: Sequence[str] = ()) -> None:
        self.name, self._table = name, table
        self.states = {state: f"name quantile({state}, 0.99)" for state in states}

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def compute(self, columns: Sequence[str]) -> None:
        for column in columns:
            assert column.partition("(")[2].partition(",")[0] in self.states
            numbers = pa.array([(i * 7 % ROWS) + len(column) / 100 for i in range(ROWS)])
            self._table = self._table.append_column(column, numbers)

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> pa.dataset.Scanner:
        return pa.dataset.dataset(self._table).scanner(columns=columns, filter=filter)


def tables(written: Callable[[int], bytes]) -> dict[str, Table]:
    hosts, numbers = [f"h{i % 3}" for i in range(ROWS)], list(range(ROWS))
    states = pa.array([written(i) for i in range(ROWS)], pa.binary())
    rows = pa.table({"host": hosts, "n": numbers, "latency": states})
    values = pa.table({"host": hosts, "n": numbers, "latency": [i / 2 for i in range(ROWS)]})
    return {"agg": Table("agg", rows, ["latency"]), "raw": Table("raw", values)}


OF_ROWS = [
    "{c}", "{c}", *["quantile({c}, 0.5)"] * 10, "max({c}) over ()", "min({c}) over ()",
    "max(quantile({c}, 0.5)) over ()", "count({c}) over ()", "coalesce({c}, null)", "case when true then {c} end",
    "{c} is null", "{c}::varchar", "hash({c})", "[{c}]", "{c} = {c}", "{c}.hash()", "(select {c})", "*", "{s}.*",
    "columns('l.*')", "hash({s})", "{s}", "row_number() over (order by {c})", "* exclude (host)", "#2", "hash(#1)",
    "list_transform([1], lambda z: z)", "list_transform([1], lambda latency: latency + 1)", "hash(columns(*))",
]  # fmt: skip
AGGREGATES = [
    *["max(quantile({c}, 0.5))"] * 5, "max(quantile(latency, 0.5))", "quantile({c}, 0.5)", "max({c})", "count({c})",
    "sum(n)",
    "count(distinct {c})", "min({c}) filter (where true)", "max(case when true then {c} end)", "first({c})",
    "quantile(distinct {c}, 0.5)", "quantile({c}, 0.5) filter (where true)", "(select max({c}))", "max(columns(*))",
    "count(columns(*))", "count(*)", "max(columns(* exclude (latency)))", "sum(latency)", "max(n)",
]  # fmt: skip


class Statements:
    """Made up by a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = 0

    def query(self, depth: int = 1, ctes: Sequence[str] = ()) -> str:
        pick, head = self._rng.random, ""
        if depth and pick() < 0.3:
            name = self._rng.choice(["agg", "raw", "c"])
            head = f"with {name}{self._rng.choice(['', '(latency)', '(n, latency)'])} as ({self.query(0)}) "
            ctes = [*ctes, name]
        sources = [self._source(depth, ctes) for _ in range(1 if pick() < 0.7 else 2)]
        grouped = pick() < 0.4
        items = [self._item([name for _, name in sources], depth, grouped) for _ in range(1 if pick() < 0.6 else 2)]
        text = f"{head}select {', '.join(items)} from {' cross join '.join(source for source, _ in sources)}"
        column = self._column([name for _, name in sources])
        if pick() < 0.2:
            text += f" where {self._rng.choice([f'{column} is not null', f'{column} > 3', 'true'])}"
        if grouped:
            text += self._rng.choice(["", " group by all"])
            text += self._rng.choice(["", "", f" having count({column}) > 1", f" having {column} > 1"])
        if pick() < 0.15:
            text += f" order by {self._rng.choice([column, f'hash({column})', '1'])}"
        if depth and pick() < 0.1:
            text = f"({text}) union all ({self.query(0, ctes)})"
        return text

    def _source(self, depth: int, ctes: Sequence[str]) -> tuple[str, str]:
        self._names += 1
        alias = self._rng.choice([f"t{self._names}", "agg", "raw"]) if self._rng.random() < 0.7 else ""
        if depth and self._rng.random() < 0.35:
            alias = alias or f"t{self._names}"
            names = self._rng.choice(["", "", "(latency)", "(n, latency)"])
            return f"({self.query(depth - 1, ctes)}) as {alias}{names}", alias
        table = self._rng.choice(["agg", "agg", "main.agg", "raw", "memory.main.raw", *ctes])
        return (f"{table} as {alias}" if alias else table), alias or table.rpartition(".")[2]

    def _column(self, sources: Sequence[str]) -> str:
        name = self._rng.choice(["latency", "latency", "latency", "latency", "host", "n"])
        is_alone = self._rng.random() < (0.5 if len(sources) == 1 else 0.1)
        return name if is_alone else f"{self._rng.choice(sources)}.{name}"

    def _item(self, sources: Sequence[str], depth: int, grouped: bool) -> str:
        column, source = self._column(sources), self._rng.choice(sources)
        forms = AGGREGATES if grouped else OF_ROWS
        text = self._rng.choice(forms).format(c=column, s=source)
        if depth and self._rng.random() < 0.1:
            text = f"(select max({self._column(['raw', *sources])}) from raw)"
        is_star = "*" in text and "columns" not in text
        alias = self._rng.choice(["latency", "latency", "n", "z"])
        return text if is_star or self._rng.random() < 0.6 else f"{text} as {alias}"


def asked(text: str, written: Callable[[int], bytes]) -> Any:
    """The rows, in no order, with the number of a state's row in the place of its bytes; or the refusal."""
    known = tables(written)
    try:
        found = as_table(answer(text, None, lambda name: known.get(name.lower()), lambda: (), LIMITS))
    except KiviError as error:
        return error
    rows_of = {written(i): f"state {i}" for i in range(ROWS)}
    columns = [
        [rows_of.get(x, x) if isinstance(x, bytes) else x for x in column.to_pylist()] for column in found.columns
    ]
    return found.column_names, sorted(map(repr, zip(*columns, strict=True)))


@pytest.mark.story
@pytest.mark.hypothesis
def test_no_answer_depends_on_how_a_state_is_written_down() -> None:
    outcomes = Counter[str]()
    for seed in range(1_000 if AT_NIGHT else 100):
        text = Statements(seed).query()
        first = asked(text, lambda i: bytes([i, 1]))
        second = asked(text, lambda i: bytes([255 - i]) * (i + 3))
        if isinstance(first, KiviError):
            assert type(first) is type(second) and isinstance(first, InvalidArgument | NotFound), text
            refused = any(words in str(first) for words in ("state of a measure", "number of each row"))
            outcomes["refused" if refused else "wrong anyway"] += 1
        else:
            assert first == second, text
            outcomes["answered with quantiles" if "quantile(" in text else "answered"] += 1
    assert min(outcomes[kind] for kind in ("refused", "answered", "answered with quantiles")) >= 10, outcomes
