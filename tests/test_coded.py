"""Coded columns: values come back as they were, whatever was coded on the way, from every place that they pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.arrow.dictionaries import ROWS_MIN, as_coded, coded, is_coded, plain, together, written_bytes
from kivi.arrow.ipc import decode_ipc, encode_ipc, own_batches
from tests.serverproc import ServerProcess

WORDS = st.lists(
    st.none() | st.sampled_from(["", "a", "b\0c", "Ä", "a long name of a service"]), min_size=1, max_size=9
)


def batch(words: list[str | None], rows: int, distinct: int = 0) -> pa.RecordBatch:
    """A column that repeats, one of ``distinct`` values (0: all different), one of bytes, one of numbers."""
    few = [words[i % len(words)] for i in range(rows)]
    drawn = np.random.default_rng(1).integers(0, distinct, rows) if distinct else np.arange(rows)
    many = [str(number) for number in drawn.tolist()]
    of_bytes = [None if word is None else word.encode() for word in reversed(few)]
    return pa.record_batch({"few": few, "many": many, "b": pa.array(of_bytes, pa.binary()), "n": range(rows)})


def typed(words: list[str | None], rows: int, distinct: int = 0) -> pa.RecordBatch:
    found = batch(words, rows, distinct)
    return found.set_column(0, "few", found.column("few").cast(pa.string()))


@given(
    st.lists(
        st.tuples(WORDS, st.sampled_from([1, ROWS_MIN - 1, ROWS_MIN, 3_000]), st.booleans()), min_size=1, max_size=4
    )
)
def test_what_is_coded_and_put_together_is_what_it_was(given_: list[tuple[list[str | None], int, bool]]) -> None:
    plains = [typed(words, rows) for words, rows, _ in given_]
    mixed = [coded(each) if code else each for each, (_, _, code) in zip(plains, given_, strict=True)]
    joined = together(mixed)
    expected = pa.concat_batches(plains)
    assert plain(joined).equals(expected)
    assert plain(coded(joined)).equals(expected)
    assert plain(joined.slice(joined.num_rows // 3)).equals(expected.slice(joined.num_rows // 3))
    (again,) = own_batches(encode_ipc(joined))
    assert plain(again).equals(expected)
    for column, other in zip(joined.columns, expected.columns, strict=True):
        if is_coded(column):
            texts = sum(len(v if isinstance(v, bytes) else v.encode()) for v in other.to_pylist() if v is not None)
            assert written_bytes(column) == texts + 4 * len(column)


@pytest.mark.parametrize(
    ("distinct", "width"), [(100, pa.int8()), (128, pa.int8()), (129, pa.int16()), (5_000, pa.int16())]
)
def test_codes_are_as_narrow_as_their_number_allows(distinct: int, width: Any) -> None:
    found = coded(typed(["x"], 40_000, distinct))
    assert found.column("many").type.index_type == width
    joined = together([found, coded(typed(["x"], 40_000, distinct + 200))])
    assert joined.column("many").type.index_type == (pa.int16() if distinct < 2**15 - 200 else pa.int32())


def test_what_does_not_repeat_stays_as_it_is() -> None:
    found = coded(typed(["x", "y"], 4_000))
    assert [is_coded(column) for column in found.columns] == [True, False, True, False]
    assert coded(found.slice(0, 100)).column("few").type == found.column("few").type
    assert not is_coded(coded(typed(["x"], ROWS_MIN - 1)).column("few"))


@pytest.mark.parametrize(
    ("values", "indices", "kept"),
    [
        (["a", "b"], [0, 1, None, 1], True),
        (["a", "a"], [0, 1, 0, 1], False),  # two codes of one value would be two groups of one key
        (["a", None], [0, 1, 0, 1], False),
        ([str(i) for i in range(ROWS_MIN)], [0, 1, 0, 1], True),  # without the names that nobody has
        ([str(i) for i in range(ROWS_MIN + 1)], [0, 1, 0, 1], False),  # not worth looking at
    ],
)
def test_a_strangers_dictionary_is_kept_only_if_it_is_as_ours(
    values: list[Any], indices: list[Any], kept: bool
) -> None:
    rows = pa.array(indices * (ROWS_MIN // 4), pa.int32())
    array = pa.DictionaryArray.from_arrays(rows, pa.array(values, pa.string()))
    found = as_coded(array)
    assert (found is not None) == kept
    if kept:
        assert found.dictionary_decode().equals(array.dictionary_decode())


def test_a_strangers_dictionary_of_many_names_is_written_out() -> None:
    names = pa.array([str(i) for i in range(ROWS_MIN // 4 + 1)])
    every = pa.array(list(range(len(names))) * 4, pa.int32())
    assert as_coded(pa.DictionaryArray.from_arrays(every.slice(0, ROWS_MIN), names)) is None
    assert as_coded(pa.DictionaryArray.from_arrays(every, names)) is not None


def test_a_stream_keeps_its_dictionaries_of_text_if_asked() -> None:
    sent = coded(typed(["x", "y", None], 3_000))
    limits: Any = {"max_bytes": 1 << 20, "max_rows": 10_000}
    kept = decode_ipc(encode_ipc(sent), **limits, codes=True)
    assert [pa.types.is_dictionary(field.type) for field in kept.schema] == [True, False, True, False]
    assert not any(pa.types.is_dictionary(field.type) for field in decode_ipc(encode_ipc(sent), **limits).schema)


# -- in a store ------------------------------------------------------------------------------------------

COLUMNS = {"service": "string", "trace": "string", "ts": "timestamp", "us": "int64"}
ROWS = 3_000


def records(seed: int, form: str) -> Any:
    rng = np.random.default_rng(seed)
    names = [None, "", *(f"service-{i}" for i in range(150 if seed % 2 else 3))]
    service = pa.array([names[i] or "none" for i in rng.integers(0, len(names), ROWS)])
    table = pa.table(
        {
            "service": service.dictionary_encode() if form == "dictionary" else service,
            "trace": [f"{seed}-{i}" for i in range(ROWS)],
            "ts": pa.array(rng.integers(0, 10**9, ROWS)).cast(pa.timestamp("us", "UTC")),
            "us": rng.integers(0, 10**6, ROWS),
        }
    )
    return table.to_pylist() if form == "dicts" else table


@pytest.fixture(params=["embedded", "client"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "embedded":
        with kivi.open(tmp_path / "data", block_rows=4_000) as db:
            yield db
    else:
        with ServerProcess(tmp_path / "data") as server, server.connect() as db:
            yield db


def test_events_and_aggregates_are_the_same_however_text_was_appended(opened: Any) -> None:
    """Plain, as dictionaries, as dicts, in one transaction and in many, staged; before and after it was folded."""
    db = opened
    db.create_event_table("e", event_time="ts", columns=COLUMNS)
    db.create_aggregate("a", source="e", group_by=["service"], measures={"n": kivi.count(), "us": kivi.sum("us")})
    forms = ["plain", "dictionary", "dicts", "dictionary", "plain"]
    for seed, form in enumerate(forms):
        db.append("e", records(seed, form))
    with db.transaction() as tx:
        for seed, form in enumerate(forms, 10):
            tx.append("e", records(seed, form))
        tx.append("e", records(99, "dicts")[:5])
        own = [row["service"] for row in tx.scan("e", where=kivi.col("service") == "service-1")]
        assert set(own) == {"service-1"}
        seen = {row["service"]: row["n"] for row in tx.scan("a")}
    sent = pa.concat_tables(
        [pa.Table.from_pylist(records(seed, "dicts")) for seed in [*range(len(forms)), *range(10, 10 + len(forms))]]
        + [pa.Table.from_pylist(records(99, "dicts")[:5])]
    )
    expected = {
        row["service"]: (row["us_count"], row["us_sum"])
        for row in sent.group_by("service").aggregate([("us", "sum"), ("us", "count")]).to_pylist()
    }
    assert seen == {name: n for name, (n, _) in expected.items()}
    for _ in range(2):
        with db.snapshot() as snapshot:
            found = snapshot.to_arrow("e")
            assert found.column("service").type == pa.string()
            assert (
                found.select(["trace", "service", "us"])
                .sort_by([("trace", "ascending"), ("us", "ascending")])
                .equals(sent.select(["trace", "service", "us"]).sort_by([("trace", "ascending"), ("us", "ascending")]))
            )
            wanted = snapshot.to_arrow("e", where=kivi.col("service") == "service-1", columns=["us"])
            assert wanted.num_rows == expected["service-1"][0]
            assert {row["service"]: (row["n"], row["us"]) for row in snapshot.scan("a")} == expected
        db.consolidate()


def test_codes_survive_a_crash_and_become_an_aggregate_later(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            db.create_event_table("e", event_time="ts", columns=COLUMNS)
            for seed, form in enumerate(["plain", "dictionary"]):
                db.append("e", records(seed, form))
        server.kill()
        server.start()
        with server.connect() as db:
            db.append("e", records(2, "dictionary"))
            db.create_aggregate("a", source="e", group_by=["service"], measures={"n": kivi.count()})
            with db.snapshot() as snapshot:
                rows = {row["service"]: row["n"] for row in snapshot.scan("a")}
    names = [row["service"] for seed in range(3) for row in records(seed, "dicts")]
    assert rows == {name: names.count(name) for name in set(names)}
