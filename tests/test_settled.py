"""Equal columns are equal bytes, and events are the same events however Arrow holds them (R16).

What lies under a null, where in its buffers an array begins, and how text is encoded are no part of an event: a retry
under the same token may have others, and is the same payload.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.arrow.columns import TIMESTAMP
from kivi.arrow.dictionaries import ROWS_MIN, as_coded, coded, settled
from kivi.arrow.ipc import encode_ipc
from kivi.errors import InvalidArgument

VALUES: dict[Any, list[Any]] = {
    pa.bool_(): [True, False],
    pa.int64(): [1, -2, 3],
    pa.float64(): [1.5, 0.0],
    TIMESTAMP: [1, 2],
    pa.decimal128(18, 3): [Decimal("1.5"), Decimal(-2)],
    pa.string(): ["a", "", "cé"],
    pa.binary(): [b"\0", b"", b"cc"],
}


def under(values: Any, valid: Any) -> Any:
    """The array with nulls where ``valid`` says so, and its values still under them."""
    mask = pa.array(valid, pa.bool_())
    return pa.Array.from_buffers(values.type, len(values), [mask.buffers()[1], *values.buffers()[1:]])


@given(st.data(), st.sampled_from(list(VALUES)))
def test_nothing_is_left_under_nulls(data: st.DataObject, type_: Any) -> None:
    shown = data.draw(st.lists(st.sampled_from(VALUES[type_]), min_size=1, max_size=40))
    hidden = data.draw(st.lists(st.sampled_from(VALUES[type_]), min_size=len(shown), max_size=len(shown)))
    valid = data.draw(st.lists(st.booleans(), min_size=len(shown), max_size=len(shown)))
    at = data.draw(st.integers(0, len(shown) - 1))
    first = under(pa.array(shown, type_), valid).slice(at)
    mixed = [value if is_ else other for value, other, is_ in zip(shown, hidden, valid, strict=True)]
    again = under(pa.array(mixed, type_), valid).slice(at)
    for array in (first, again):
        found = settled(array)
        found.validate(full=True)
        assert found.equals(array) and found.null_count == array.null_count
    parts = [encode_ipc(pa.record_batch({"c": settled(array)})) for array in (first, again)]
    assert parts[0] == parts[1]


@given(
    st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))),
    st.integers(0, 2**32 - 1),
    st.integers(ROWS_MIN - 1, 2 * ROWS_MIN),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_codes_do_not_depend_on_the_dictionary_that_was_sent(
    names: tuple[int, list[int]], seed: int, rows: int, nulls: float
) -> None:
    count, order = names
    random = np.random.default_rng(seed)
    words = np.array([f"word {i}" for i in range(count)])
    codes = random.integers(0, random.integers(1, count + 1), rows)
    valid = random.random(rows) >= nulls
    place = np.argsort(order)
    sent = pa.array(place[codes].astype(np.int32), mask=~valid)
    text = pa.array(words[codes], pa.string(), mask=~valid)
    expected = coded(pa.record_batch({"c": text}))
    found = as_coded(pa.DictionaryArray.from_arrays(sent, pa.array(words[order], pa.string())))
    if found is None:
        return  # it is written out, and is what ``text`` is
    found.validate(full=True)
    assert encode_ipc(pa.record_batch({"c": found})) == encode_ipc(expected)


ROWS = 3 * ROWS_MIN


@pytest.fixture(params=["embedded", "client"])
def db(request: Any, tmp_path: Path) -> Any:
    from tests.serverproc import ServerProcess

    if request.param == "embedded":
        with kivi.open(tmp_path / "store") as found:
            yield found
        return
    with ServerProcess(tmp_path / "store") as server, server.connect() as found:
        yield found


def test_a_retry_is_the_same_payload_however_its_events_are_held(db: Any) -> None:
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "name": "string", "x": "int64"})
    random = np.random.default_rng(1)
    valid = random.random(ROWS) >= 0.3
    x = random.integers(0, 100, ROWS)
    words = np.array([f"word {i}" for i in range(40)])
    codes = random.integers(0, 40, ROWS).astype(np.int32)
    ts = pa.array(np.arange(ROWS), TIMESTAMP)
    name = pa.array(words[codes], pa.string())
    first = pa.table({"ts": ts, "name": name, "x": pa.array(np.where(valid, x, 0), mask=~valid)})
    garbage = pa.array(np.where(valid, x, 77), mask=~valid)
    order = random.permutation(40)
    others = {
        "as rows": first.to_pylist(),
        "with something under its nulls": first.set_column(2, "x", garbage),
        "in two chunks": pa.concat_tables([first.slice(0, 11), first.slice(11)]),
        "from the middle of others": pa.concat_tables([first.slice(0, 11), first]).combine_chunks().slice(11),
        "in codes": first.set_column(1, "name", name.dictionary_encode()),
        "in codes of a sorted dictionary": first.set_column(
            1, "name", pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(words))
        ),
        "in codes of any dictionary": first.set_column(
            1, "name", pa.DictionaryArray.from_arrays(pa.array(np.argsort(order)[codes]), pa.array(words[order]))
        ),
        "with a name that is not used": first.set_column(
            1, "name", pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([*words, "nobody"]))
        ),
    }
    commit_ts = db.append("ev", first, token="once")
    for how, events in others.items():
        assert db.append("ev", events, token="once") == commit_ts, how
    with db.snapshot() as snap:
        assert snap.to_arrow("ev").num_rows == ROWS
    x[np.flatnonzero(valid)[-1]] += 1
    with pytest.raises(InvalidArgument, match="another payload"):
        db.append("ev", first.set_column(2, "x", pa.array(x, mask=~valid)), token="once")
