"""Request tokens in the engine: that one that was saved is found, also if an older version kept it in a block (R16)."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.api.tokens import new_token
from kivi.cli.offline import examine
from kivi.encoding.keyspaces import Space, space_prefix, token_key
from kivi.encoding.pretty import entry
from kivi.encoding.token_blocks import Saved, decode_block
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import RocksEngine
from kivi.errors import DataLoss
from kivi.mvcc.tokens import FENCED, Remembered, Tokens

NOW = 1_800_000_000_000_000


def regular(issued: int, n: int = 0) -> str:
    return f"k1-{issued:016d}-{n:024x}"


SAVED = [Saved(regular(NOW, 255), 40, b"a" * 16), Saved(regular(NOW + 5, 1), 300, b"b" * 16)]
BLOCK = b"\x0b" + struct.pack(">QQQ", NOW + 5, NOW, 40)
DATA = b"".join(
    [
        struct.pack("<IBH", 2, 2, 2),
        bytes(11) + b"\xff" + bytes(11) + b"\x01",
        struct.pack("<II", 0, 5) + struct.pack("<HH", 0, 260) + struct.pack("<HH", 1, 0),
        b"b" * 16 + b"a" * 16,
    ]
)
ONE = struct.pack("<IBH", 1, 0, 1) + bytes(11) + b"\x01" + bytes(4) + b"b" * 16
ONE_KEY = b"\x0b" + struct.pack(">QQQ", NOW + 5, NOW + 5, 300)


def test_blocks_as_older_versions_wrote_them() -> None:
    assert decode_block(BLOCK, DATA) == SAVED
    assert decode_block(ONE_KEY, ONE) == SAVED[1:]
    assert "2 tokens" in entry(b"\x0c" + BLOCK[1:], DATA, lambda table: None)


@pytest.mark.parametrize("cut", [0, 3, 6, 20, 30, 60, -1])
def test_a_damaged_block_is_dataloss(cut: int) -> None:
    for bad in (DATA[:cut], DATA + b"x", bytes(len(DATA)), DATA[:4] + b"\x03" + DATA[5:]):
        with pytest.raises(DataLoss, match="restore a backup"):
            decode_block(BLOCK, bad)
    at = DATA.index(struct.pack("<HH", 1, 0))
    for bad in (
        DATA[:at] + struct.pack("<HH", 1, 2) + DATA[at + 4 :],
        DATA.replace(struct.pack("<II", 0, 5), bytes(8)),
    ):
        with pytest.raises(DataLoss):
            decode_block(BLOCK, bad)
    with pytest.raises(DataLoss):
        decode_block(BLOCK[:-1], DATA)


def put(engine: MemoryEngine | RocksEngine, *pairs: tuple[bytes, bytes]) -> None:
    batch = WriteBatch()
    for key, value in pairs:
        batch.put(key, value)
    engine.write(batch)


def test_blocks_become_rows_and_a_row_that_there_is_has_the_last_word() -> None:
    engine = MemoryEngine()
    fence = Remembered(FENCED, bytes(16))
    put(engine, (BLOCK, b""), (b"\x0c" + BLOCK[1:], DATA), (token_key(SAVED[0].token), fence.encode()))
    tokens = Tokens(engine, ttl_us=1 << 62)
    assert tokens.find(SAVED[0].token) == fence
    assert tokens.find(SAVED[1].token) == Remembered(300, b"b" * 16)
    assert tokens.known([one.token for one in SAVED] + [regular(NOW, 9)], NOW) == {one.token for one in SAVED}
    assert not [*engine.scan(space_prefix(Space.TOKENS), None)]
    put(engine, (BLOCK, b""))
    with pytest.raises(DataLoss, match="tokens at key"):  # its data are missing
        Tokens(engine, ttl_us=1)


def save(
    tokens: Tokens, engine: MemoryEngine, upto: int = 1 << 60, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """As a pass does."""
    tokens.cut()
    rows = [*tokens.rows(upto)]
    meanwhile()
    put(engine, *rows)
    tokens.drop(upto, threading.Lock())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("fence"), st.integers(0, 40)),
        st.tuples(st.just("save"), st.integers(0, 60)),
        st.tuples(st.just("fail"), st.integers(0, 60)),
        st.tuples(st.just("fence while saving"), st.integers(0, 40)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


@given(STEPS, st.integers(0, 2**32))
def test_r16_what_was_said_last_of_a_token_is_what_is_found(steps: list[Any], seed: int) -> None:
    """Groups that are remembered, fences before and after they were set aside, failing writes, and all of it reopened.

    Every third token is of clients whose clock is ahead by seconds, every fifth is none of the library.
    """
    draw = random.Random(seed)
    names = [
        f"mine {i}" if i % 5 == 0 else regular(NOW + draw.randrange(3) + (i % 3 == 0) * draw.randrange(10**7), i)
        for i in range(41)
    ]
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    model: dict[str, Remembered] = {}
    cts = 1

    def fence(i: int) -> None:
        tokens.forget(names[i])
        model[names[i]] = Remembered(FENCED, bytes(16))

    for step, what in steps:
        match step:
            case "commit":
                group = [names[i] for i in what if names[i] not in model]
                if group:
                    digests = [bytes([i % 3]) * 16 for i in range(len(group))]
                    tokens.remember_many(group, cts, digests)
                    model.update(zip(group, map(Remembered, range(cts, cts + len(group)), digests), strict=True))
                    cts += len(group)
            case "fence":
                fence(what)
            case "save":
                save(tokens, engine, what)
            case "fail":
                tokens.cut()
                [*tokens.rows(what)]
            case "fence while saving":
                save(tokens, engine, meanwhile=partial(fence, what))
            case "reopen":
                save(tokens, engine)
                assert tokens.unsaved == 0
                tokens = Tokens(engine, ttl_us=1 << 62)
        for name in names:
            assert tokens.find(name) == model.get(name)
        assert tokens.known(names, NOW) == set(model)
        for name in names:
            assert tokens.known([name], NOW) == ({name} & model.keys())


def test_tokens_that_are_remembered_one_by_one_are_found_and_saved_as_others() -> None:
    """As replay does it; late ones, gaps, and passes in between."""
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    order = [*range(1, 400), *range(405, 700), 402, 403, *range(700, 720), 401, 404, *range(720, 1_300)]
    model = {}
    for n, cts in enumerate(order):
        model[regular(NOW + cts, cts)] = (cts, bytes([cts % 7]) * 16)
        tokens.remember(regular(NOW + cts, cts), *model[regular(NOW + cts, cts)])
        if n % 333 == 0:
            save(tokens, engine, upto=cts - 20)
            assert tokens.unsaved in range(19, 22) or n == 0
    assert {name: tokens.find(name) for name in model} == {name: Remembered(*what) for name, what in model.items()}
    save(tokens, engine)
    assert tokens.unsaved == 0 and tokens.check() == len(order)
    assert {name: tokens.find(name) for name in model} == {name: Remembered(*what) for name, what in model.items()}


def test_tokens_of_the_library_go_once_they_are_past_their_time() -> None:
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1_000_000)
    old = [regular(NOW - 5_000_000 + i * 100_000, i) for i in range(30)]
    tokens.remember_many(old, 1, [bytes(16)] * 30)
    tokens.remember("k1-1-x", 31, bytes(16))
    tokens.remember("mine", 32, bytes(16))
    tokens.remember("k1-12a-mine", 33, bytes(16))  # a caller's own, whatever it looks like
    tokens.remember("k1--", 34, bytes(16))
    save(tokens, engine)
    count = len([*engine.scan(b"", None)])
    while (batch := tokens.trim(NOW - 1_500_000, 3)) is not None:
        assert len(batch) <= 3
        engine.write(batch)
    left = [key for key, _ in engine.scan(b"", None)]
    assert len(left) < count and token_key("mine") in left and token_key("k1-1-x") not in left
    assert tokens.find(old[-1]) is not None and tokens.find(old[0]) is None
    assert token_key("k1-12a-mine") in left and token_key("k1--") in left
    assert tokens.check() == 3 + 30 - sum(tokens.find(name) is None for name in old)


def test_a_row_that_an_older_version_wrote_is_found_and_goes_in_its_time() -> None:
    engine = MemoryEngine()
    batch = WriteBatch()
    batch.put(token_key(regular(NOW)), struct.pack("<Q16s", 7, b"d" * 16))
    engine.write(batch)
    tokens = Tokens(engine, ttl_us=1_000)
    assert tokens.find(regular(NOW)) == Remembered(7, b"d" * 16)
    assert tokens.known([regular(NOW), regular(NOW, 1)], NOW) == {regular(NOW)}
    gone = tokens.trim(NOW + 2_000, 10)
    assert gone is not None and len(gone) == 1


def test_verify_reads_tokens_of_older_versions(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data") as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        for _ in range(5):
            with db.transaction(token=new_token()) as tx:
                tx.delta("t", (1,), n=1)
        db.consolidate()
    assert examine(str(tmp_path / "data"))["tokens"] == "5 request tokens"
    engine = RocksEngine(str(tmp_path / "data" / "engine"))
    put(engine, (BLOCK, b""), (b"\x0c" + BLOCK[1:], DATA[:-1]))
    engine.flush()
    engine.close()
    with pytest.raises(DataLoss, match="tokens at key"):
        examine(str(tmp_path / "data"))


def test_r16_retries_of_many_commits_after_a_restart_and_a_crash(tmp_path: Path) -> None:
    """Through the whole store, on disk: each retry gets its first timestamp, and nothing is counted twice."""
    with kivi.open(tmp_path / "data") as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        stamps: dict[str, int] = {}
        for i in range(60):
            token = new_token()
            with db.transaction(token=token) as tx:
                tx.delta("t", (1,), n=i)
            assert tx.commit_ts is not None
            stamps[token] = tx.commit_ts
            if i % 20 == 0:
                db.consolidate()
        db.consolidate()
        assert db.stats()["tokens_unsaved"] == 0
    with kivi.open(tmp_path / "data") as db:
        assert {token: db.outcome(token) for token in stamps} == stamps
        for i, (token, stamp) in enumerate(stamps.items()):
            with db.transaction(token=token) as tx:
                tx.delta("t", (1,), n=i)
            assert tx.commit_ts == stamp
            with pytest.raises(kivi.InvalidArgument, match="another payload"), db.transaction(token=token) as tx:
                tx.delta("t", (1,), n=-1)
        with db.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": sum(range(60))}
