"""Request tokens in blocks: the bytes, and that a token that was saved in one is found like any other (R16)."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kivi
from kivi.api.tokens import new_token
from kivi.cli.offline import examine
from kivi.encoding.keyspaces import Space, space_prefix, split_token_block_key, token_key
from kivi.encoding.pretty import entry
from kivi.encoding.token_blocks import (
    BLOCK_TOKENS_MAX,
    SPAN_US_MAX,
    Saved,
    are_regular,
    decode_block,
    encode_blocks,
    find_in_block,
    issued_us,
)
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import RocksEngine
from kivi.errors import DataLoss
from kivi.mvcc.tokens import FENCED, Remembered, Tokens

NOW = 1_800_000_000_000_000


def regular(issued: int, n: int = 0) -> str:
    return f"k1-{issued:016d}-{n:024x}"


def blocks_of(saved: list[Saved]) -> list[tuple[bytes, bytes, bytes]]:
    """(key, key of the data, data) of each block."""
    rows = [*encode_blocks(*zip(*saved, strict=True))] if saved else []
    assert len(rows) % 2 == 0 and not any(value for _, value in rows[::2])
    return [(key, data_key, data) for (key, _), (data_key, data) in zip(rows[::2], rows[1::2], strict=True)]


SAVED = st.lists(
    st.builds(
        Saved,
        st.builds(regular, st.integers(0, 50) | st.integers(0, 10**16 - 1), st.integers(0, 2**96 - 1)),
        st.integers(1, 300) | st.integers(1, 2**62),
        st.sampled_from([bytes(16), b"a" * 16]) | st.binary(min_size=16, max_size=16),
    ),
    unique_by=(lambda one: one.token, lambda one: one.cts),
    max_size=30,
)


@given(SAVED)
def test_what_is_in_blocks_is_what_was_saved(saved: list[Saved]) -> None:
    found: list[Saved] = []
    last = -1
    for key, data_key, data in blocks_of(saved):
        newest, oldest, cts = split_token_block_key(key)
        assert last < oldest <= newest <= oldest + SPAN_US_MAX
        assert split_token_block_key(data_key) == (newest, oldest, cts)
        block = decode_block(data_key, data)
        times = [issued_us(one.token) for one in block]
        assert times == sorted(times) and (times[0], times[-1]) == (oldest, newest)
        assert min(one.cts for one in block) == cts
        for one in block:
            assert find_in_block(key, data, [one.token]) == {one.token: (one.cts, one.digest)}
            other = one.token[:-1] + ("0" if one.token[-1] != "0" else "1")
            if other not in {each.token for each in saved}:
                assert find_in_block(key, data, [other]) == {}
        assert find_in_block(key, data, [one.token for one in block]) == {one.token: one[1:] for one in block}
        found += block
        last = newest
    assert sorted(found) == sorted(saved)


def test_a_block_holds_so_many_of_so_long_a_time() -> None:
    many = [Saved(regular(NOW + i % 7, i), i + 1, bytes(16)) for i in range(2 * BLOCK_TOKENS_MAX + 1)]
    assert [len(decode_block(key, data)) for _, key, data in blocks_of(many)] == [BLOCK_TOKENS_MAX] * 2 + [1]
    apart = [Saved(regular(NOW + i * SPAN_US_MAX // 2), i + 1, bytes(16)) for i in range(7)]
    assert [len(decode_block(key, data)) for _, key, data in blocks_of(apart)] == [3, 3, 1]


def test_what_is_found_lies_where_a_token_begins() -> None:
    """Bytes across two tokens that are those of a third are not that one; nor is one of another time."""
    n = int("0102" * 6, 16)
    saved = [Saved(regular(NOW, n), 1, bytes(16)), Saved(regular(NOW, n + 1), 2, bytes(16))]
    ((key, _, data),) = blocks_of(saved)
    across = bytes.fromhex(saved[0].token[20:] + saved[1].token[20:])[5:17].hex()
    asked = [f"k1-{NOW:016d}-{across}", regular(NOW + 1, n), saved[1].token]
    assert find_in_block(key, data, asked) == {saved[1].token: (2, bytes(16))}


def test_bytes_of_a_block() -> None:
    """As they are on disk for good."""
    saved = [Saved(regular(NOW + 5, 1), 300, b"b" * 16), Saved(regular(NOW, 255), 40, b"a" * 16)]
    ((key, data_key, data),) = blocks_of(saved)
    assert key == b"\x0b" + struct.pack(">QQQ", NOW + 5, NOW, 40)
    assert data_key == b"\x0c" + key[1:]
    wanted = struct.pack("<IBH", 2, 2, 2) + bytes(11) + b"\xff" + bytes(11) + b"\x01"
    wanted += struct.pack("<II", 0, 5) + struct.pack("<HH", 0, 260) + struct.pack("<HH", 1, 0) + b"b" * 16 + b"a" * 16
    assert data == wanted
    ((_, _, one),) = blocks_of(saved[:1])
    assert one == struct.pack("<IBH", 1, 0, 1) + bytes(11) + b"\x01" + bytes(4) + b"b" * 16


@pytest.mark.parametrize("cut", [0, 3, 6, 20, 30, 60, -1])
def test_a_damaged_block_is_dataloss(cut: int) -> None:
    saved = [Saved(regular(NOW + i, i), i + 1, bytes(16)) for i in range(5)]
    ((key, _, data),) = blocks_of(saved)
    for bad in (data[:cut], data + b"x", bytes(len(data)), data[:4] + b"\x03" + data[5:]):
        with pytest.raises(DataLoss, match="restore a backup"):
            decode_block(key, bad)
        with pytest.raises(DataLoss):
            find_in_block(key, bad, [saved[0].token])


def test_a_digest_that_is_not_there_and_a_key_that_is_none_are_dataloss() -> None:
    saved = [Saved(regular(NOW + i, i), i + 1, bytes([i]) * 16) for i in range(3)]
    ((key, _, data),) = blocks_of(saved)
    at = data.index(struct.pack("<HHH", 0, 1, 2))
    bad = data[:at] + struct.pack("<HHH", 0, 1, 3) + data[at + 6 :]
    with pytest.raises(DataLoss):
        decode_block(key, bad)
    with pytest.raises(DataLoss):
        find_in_block(key, bad, [saved[2].token])
    engine = MemoryEngine()
    batch = WriteBatch()
    batch.put(key[:-1], b"")
    engine.write(batch)
    with pytest.raises(DataLoss):
        Tokens(engine, ttl_us=1)


NO_TOKENS = [
    "", "k1-", "mine", regular(NOW)[:-1], regular(NOW) + "0", regular(NOW).upper(), regular(NOW)[:-1] + "g",
    regular(NOW)[:-1] + "A", regular(NOW)[:-1] + " ", regular(NOW)[:-1] + "\n", regular(NOW).replace("k1", "k2"),
    "k1-" + "\u0663" * 16 + "-" + "0" * 24, "k1-180000000000000-" + "0" * 25, "k1-18000000000000000-" + "0" * 23,
]  # fmt: skip


@pytest.mark.parametrize("token", NO_TOKENS, ids=repr)
def test_what_only_looks_like_a_token_of_the_library_has_a_row_of_its_own(token: str) -> None:
    assert not are_regular([token])
    assert not are_regular([regular(NOW), token]) and not are_regular([token, regular(NOW)])
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    tokens.remember_many([regular(NOW), token, regular(NOW, 1)], 5, [b"x" * 16] * 3)
    save(tokens, engine)
    assert engine.get(token_key(token)) is not None and engine.get(token_key(regular(NOW))) is None
    for i, name in enumerate((regular(NOW), token, regular(NOW, 1))):
        assert tokens.find(name) == Remembered(5 + i, b"x" * 16)
        assert Tokens(engine, ttl_us=1 << 62).find(name) == Remembered(5 + i, b"x" * 16)


def test_tokens_whose_text_fits_only_together_are_not_regular() -> None:
    """Of 43 and of 45 characters: one behind the other they are as long as two, and may read like two."""
    text = regular(NOW) + regular(NOW, 1)
    assert are_regular([text[:44], text[44:]])
    assert not are_regular([text[:43], text[43:]]) and not are_regular([text[:45], text[45:]])
    assert not are_regular([]) and not are_regular(["", text])


def test_what_the_library_makes_is_regular() -> None:
    assert are_regular([new_token() for _ in range(1_000)])


def save(tokens: Tokens, engine: MemoryEngine, upto: int = 1 << 60) -> None:
    """As a pass does."""
    taken = []
    while some := tokens.take(upto, 3):
        taken.append(some)
    batch = WriteBatch()
    for key, value in tokens.rows(taken):
        batch.put(key, value)
    engine.write(batch)
    for some in taken:
        tokens.drop(some)


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
@settings(max_examples=300, deadline=None)
def test_r16_what_was_said_last_of_a_token_is_what_is_found(steps: list[Any], seed: int) -> None:
    """Groups that are remembered, fences before and after they were taken, writes that fail, and all of it reopened.

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
                taken = tokens.take(what, 4)
                [*tokens.rows([taken])]
                tokens.put_back(taken)
            case "fence while saving":
                taken = tokens.take(1 << 60, 100)
                rows = [*tokens.rows([taken])]
                fence(what)
                batch = WriteBatch()
                for key, value in rows:
                    batch.put(key, value)
                engine.write(batch)
                tokens.drop(taken)
            case "reopen":
                save(tokens, engine)
                assert tokens.unsaved == 0 and not tokens._stale
                tokens = Tokens(engine, ttl_us=1 << 62)
        for name in names:
            assert tokens.find(name) == model.get(name)
        assert tokens.known(names, NOW) == set(model)
        for name in names:
            assert tokens.known([name], NOW) == ({name} & model.keys())


def test_clocks_that_differ_by_hours_keep_blocks_short_and_all_are_found() -> None:
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    hour = 3_600_000_000
    names = [regular(NOW + i + (i % 4 - 2) * hour, i) for i in range(400)]
    tokens.remember_many(names, 1, [bytes(16)] * 400)
    save(tokens, engine)
    blocks = [key for key, _ in engine.scan(space_prefix(Space.TOKENS), b"\x0c")]
    assert len(blocks) == 4
    assert tokens.check() == 400
    for i, name in enumerate(names):
        assert tokens.find(name) == Remembered(i + 1, bytes(16))
    assert tokens.known([regular(NOW - 3 * hour), regular(NOW + 2 * hour)], NOW) == set()


def test_tokens_of_a_client_whose_clock_is_behind_are_looked_for_together() -> None:
    """Some are there, in blocks of several passes; and for all of them each block is read once at most."""

    class Asked(MemoryEngine):
        gets = 0

        def get(self, key: bytes) -> bytes | None:
            self.gets += 1
            return super().get(key)

    engine = Asked()
    tokens = Tokens(engine, ttl_us=1 << 62)
    saved = [regular(NOW + i * 10_000, i) for i in range(600)]  # of six seconds
    for begin in range(0, 600, 100):
        tokens.remember_many(saved[begin : begin + 100], begin + 1, [bytes(16)] * 100)
        save(tokens, engine)
    tokens = Tokens(engine, ttl_us=1 << 62)
    asked = [*saved[90:220:3], *(regular(NOW + i * 7_000, 1_000 + i) for i in range(200)), "mine", regular(NOW + 10**9)]
    random.Random(1).shuffle(asked)
    engine.gets = 0
    assert tokens.known(asked, NOW) == set(saved[90:220:3])
    assert engine.gets <= 6
    assert {name for name in asked if tokens.find(name) is not None} == set(saved[90:220:3])


def test_tokens_that_are_remembered_one_by_one_are_found_and_saved_as_others(tmp_path: Path) -> None:
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
    assert len(tokens._queued) < 12
    assert {name: tokens.find(name) for name in model} == {name: Remembered(*what) for name, what in model.items()}
    save(tokens, engine)
    assert tokens.unsaved == 0 and tokens.check() == len(order)
    assert {name: tokens.find(name) for name in model} == {name: Remembered(*what) for name, what in model.items()}


def test_blocks_go_once_their_newest_token_is_past_its_time() -> None:
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
    assert sum(key[0] == Space.TOKENS for key in left) == sum(key[0] == Space.TOKEN_DATA for key in left) > 0
    assert token_key("k1-12a-mine") in left and token_key("k1--") in left
    assert tokens.check() == 30 - sum(tokens.find(name) is None for name in old)


def test_missing_data_of_a_block_is_dataloss() -> None:
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    tokens.remember_many([regular(NOW)], 1, [bytes(16)])
    save(tokens, engine)
    ((key, value),) = engine.scan(space_prefix(Space.TOKEN_DATA), None)
    batch = WriteBatch()
    batch.delete(key)
    engine.write(batch)
    for ask in (lambda: tokens.find(regular(NOW)), tokens.check):
        with pytest.raises(DataLoss, match="missing"):
            ask()
    batch = WriteBatch()
    batch.put(key, value)
    batch.delete(b"\x0b" + key[1:])
    engine.write(batch)
    with pytest.raises(DataLoss, match="belong to no block"):
        tokens.check()


def test_a_block_that_is_trimmed_while_it_is_looked_at_is_none() -> None:
    """The sweeper holds no lock that who looks holds: what is old enough to go is forgotten, not missing."""
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1_000)
    tokens.remember_many([regular(NOW), regular(NOW, 1)], 7, [bytes(16)] * 2)
    save(tokens, engine)
    get, trimmed = engine.get, list[WriteBatch]()

    def racing(key: bytes) -> bytes | None:
        if key[0] == Space.TOKEN_DATA and not trimmed:
            trimmed.append(tokens.trim(NOW + 9_000_000, 100) or WriteBatch())
            engine.write(trimmed[0])
        return get(key)

    engine.get = racing  # type: ignore[method-assign]
    assert tokens.find(regular(NOW)) is None
    assert trimmed and len(trimmed[0]) == 2


def test_nothing_joins_a_fence() -> None:
    """Remembered one by one, from the first on: the fence has no timestamp that the next one could follow."""
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    tokens.forget(regular(NOW))
    tokens.remember(regular(NOW, 1), 1, b"d" * 16)
    assert tokens.find(regular(NOW)) == Remembered(FENCED, bytes(16)) and tokens.find(regular(NOW, 1)) == Remembered(
        1, b"d" * 16
    )
    taken = tokens.take(5, 100)
    tokens.forget(regular(NOW, 1))
    tokens.drop(taken)
    assert tokens.find(regular(NOW, 1)) == Remembered(FENCED, bytes(16))


def test_what_was_put_back_is_taken_some_at_a_time_too() -> None:
    tokens = Tokens(MemoryEngine(), ttl_us=1 << 62)
    tokens.remember_many([regular(NOW + i, i) for i in range(50)], 1, [bytes(16)] * 50)
    for _ in range(3):
        taken = []
        while some := tokens.take(40, 7):
            assert len(some) <= 7
            taken.append(some)
        assert sorted(cts for some in taken for group in some.groups for cts in group.stamps) == [*range(1, 41)]
        for some in taken:
            tokens.put_back(some)


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


def stored(path: Path) -> list[str]:
    """What the engine of an open store holds, as ``kivi dump`` shows it; of a copy."""
    copy = path.parent / "copy"
    shutil.copytree(path / "engine", copy)
    engine = RocksEngine(str(copy))
    lines = [entry(key, value, lambda table: None) for key, value in engine.scan(b"", None)]
    engine.close()
    return lines


def test_verify_reads_blocks(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data") as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        for _ in range(5):
            with db.transaction(token=new_token()) as tx:
                tx.delta("t", (1,), n=1)
        db.consolidate()
    assert examine(str(tmp_path / "data"))["tokens"] == "5 request tokens in blocks"
    engine = RocksEngine(str(tmp_path / "data" / "engine"))
    ((key, value),) = engine.scan(space_prefix(Space.TOKEN_DATA), None)
    batch = WriteBatch()
    batch.put(key, value[:-1])
    engine.write(batch)
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
        assert any(line.startswith("tokens     k1-") for line in stored(tmp_path / "data"))
        for i, (token, stamp) in enumerate(stamps.items()):
            with db.transaction(token=token) as tx:
                tx.delta("t", (1,), n=i)
            assert tx.commit_ts == stamp
            with pytest.raises(kivi.InvalidArgument, match="another payload"), db.transaction(token=token) as tx:
                tx.delta("t", (1,), n=-1)
        with db.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": sum(range(60))}
