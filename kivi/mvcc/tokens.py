"""Tokens: how a commit is recognised when it comes again (R16).

A *request token* names one attempt to commit. It lies in the same log record as the commit, so it is there exactly
if the commit is. The same token again returns the first CTS; with another payload it is InvalidArgument. Tokens that
the client library makes begin with ``k1-<time of issue, us>-``: past their time limit they are forgotten, and refused
rather than applied again. A caller's own token is kept for ever.

A *batch token* is (scope, sequence): Spark's application and batch id. A repeat returns the first CTS whatever the
batch holds this time; leaving one out is OutOfSequence; the scope keeps its high mark for ever.

*Fencing*: "not found" proves nothing while the old attempt may still be on its way. ``outcome`` therefore logs an
abort record for the token first; an attempt that arrives later meets the fence and aborts.

Lives under the committer's entry lock. Persisted by consolidation together with the commits it covers; until then
rebuilt from the log. Many commit between two passes, and nobody commits while the lock is held: consolidation takes
and drops request tokens some at a time (`take`). Taken all at once, 150,000 of them held every commit up for 0.1 s.

In the engine a token that the library made is in a block of many (``kivi.encoding.token_blocks``). Any other is in a
row of its own, and so is a fence; a row has the last word.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final, NamedTuple

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import (
    Space,
    batch_key,
    meta_key,
    space_prefix,
    token_blocks_from,
    token_data_key,
    token_key,
)
from kivi.encoding.token_blocks import (
    SPAN_US_MAX,
    are_regular,
    block_times,
    decode_block,
    encode_blocks,
    find_in_block,
    issued_us,
)
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, OutOfSequence

__all__ = ["FENCED", "Remembered", "Taken", "Tokens", "issued_at_us"]

FENCED: Final = 0
"""The CTS of a token that will never commit."""

_VALUE: Final = struct.Struct("<Q16s")
_CTS_BITS: Final = 44  # of a stored token; above them, how many members it has, less one
_SCOPE: Final = "scope/"
_IRREGULAR_MAX: Final = 100
_NEVER_US: Final = 1 << 63
_GROUP_MAX: Final = 256
_DATED_US_MAX: Final = 10**16 - 1  # what sixteen digits say


class Remembered(NamedTuple):
    """The outcome under a token: the CTS of its ``members``, which follow each other from ``cts`` on."""

    cts: int
    digest: bytes
    members: int = 1

    @staticmethod
    def decode(raw: bytes) -> Remembered:
        packed, digest = _VALUE.unpack(raw)
        return Remembered(packed & (1 << _CTS_BITS) - 1, digest, (packed >> _CTS_BITS) + 1)

    def encode(self) -> bytes:
        return _VALUE.pack(self.cts | (self.members - 1) << _CTS_BITS, self.digest)


class _Group(NamedTuple):
    """Tokens whose commits entered together, with CTS that ascend by one from ``first``; or one that was fenced, or one
    of several ``members``."""

    first: int
    tokens: list[str]
    digests: list[bytes]
    members: int = 1

    @property
    def stamps(self) -> range:
        return range(self.first, self.first + len(self.tokens))

    @property
    def last(self) -> int:
        return self.first + len(self.tokens) + self.members - 2

    @property
    def is_plain(self) -> bool:
        """Whether blocks may hold it."""
        return self.first != FENCED and self.members == 1

    def of(self, token: str) -> Remembered:
        i = self.tokens.index(token)
        return Remembered(self.first + i, self.digests[i], self.members)

    def part(self, begin: int, end: int) -> _Group:
        return _Group(self.first + begin, self.tokens[begin:end], self.digests[begin:end])


@dataclass(frozen=True, slots=True)
class Taken:
    """Request tokens that are on their way to the engine."""

    groups: list[_Group]
    is_regular: bool
    """All of them are, and none is a fence."""

    def __len__(self) -> int:
        return sum(len(group.tokens) for group in self.groups)


def issued_at_us(token: str) -> int | None:
    """The time of issue of a token that the client library made, else None."""
    if token.startswith("k1-"):
        head, _, _ = token[3:].partition("-")
        if head.isdecimal() and len(head) <= 19:
            return int(head)
    return None


def library_prefix(issued_us: int) -> str:
    return f"k1-{issued_us:016d}-"


def _dated_us(token: str) -> int:
    """The time of issue of a token that sorts by it among its like, as all of the library's do; else 0."""
    issued = token[3:19]
    if token[:3] == "k1-" and token[19:20] == "-" and issued.isascii() and issued.isdigit():
        return int(issued)
    return 0


def _newest_us(engine: Engine) -> int:
    """The time of issue of the newest dated token in the engine, or a later one. 0 if there is none."""
    blocks = space_prefix(Space.TOKENS)
    newest = next((block_times(key)[0] for key, _ in engine.scan(blocks, prefix_end(blocks), reverse=True)), 0)
    prefix = token_key(library_prefix(0)[:3])
    for i, (key, _) in enumerate(engine.scan(prefix, prefix_end(prefix), reverse=True)):
        if issued := _dated_us(key[1:].decode(errors="replace")):
            return max(issued, newest)
        if i == _IRREGULAR_MAX:
            return _NEVER_US
    return newest


class Tokens:
    """``ttl_us`` bounds how long library tokens are remembered."""

    def __init__(self, engine: Engine, *, ttl_us: int) -> None:
        self._engine = engine
        self._ttl_us = ttl_us
        self._requests: dict[str, _Group] = {}
        self._batches: dict[tuple[str, int], int] = {}
        self._high: dict[str, int] = {}
        # Of the requests, what was not taken yet: as their CTS ascend, and those that came behind a later one.
        self._queued: deque[_Group] = deque()
        self._late: list[_Group] = []
        self._growing: _Group | None = None  # the last of those queued, if tokens that come one by one may join it
        self._newest = 0
        self._stale: set[str] = set()  # that were fenced: what else was remembered of them, and is not taken, is void
        # No dated token that was issued later is in the engine, so that new ones need not be looked for there.
        self._saved_us = _newest_us(engine)
        self.hits = 0
        prefix = meta_key(_SCOPE)
        for key, value in engine.scan(prefix, prefix_end(prefix)):
            self._high[key[len(prefix) :].decode()] = int.from_bytes(value, "little")

    # -- request tokens -------------------------------------------------------------------------

    def check_age(self, token: str, now_us: int) -> None:
        """Raises InvalidArgument for a library token too old to be remembered."""
        issued = issued_at_us(token)
        if issued is not None and issued < now_us - self._ttl_us:
            raise InvalidArgument(f"the token {token!r} was issued too long ago to be remembered; nothing was applied")

    def find(self, token: str) -> Remembered | None:
        group = self._requests.get(token)
        if group is not None:
            found: Remembered | None = group.of(token)
        elif (raw := self._engine.get(token_key(token))) is not None:
            found = Remembered.decode(raw)
        else:
            found = self._in_blocks((token,)).get(token)
        if found is not None:
            self.hits += 1
        return found

    def _in_blocks(self, tokens: Iterable[str]) -> dict[str, Remembered]:
        """Looks tokens up in blocks; tokens of about the same time are looked for together."""
        wanted = sorted([(issued_us(token), token) for token in tokens if are_regular((token,))])
        found: dict[str, Remembered] = {}
        begin = 0
        while begin < len(wanted):
            end = begin + 1
            while end < len(wanted) and wanted[end][0] - wanted[end - 1][0] <= SPAN_US_MAX:
                end += 1
            near, begin = wanted[begin:end], end
            until = token_blocks_from(near[-1][0] + SPAN_US_MAX + 1)
            for key, _ in self._engine.scan(token_blocks_from(near[0][0]), until):
                newest, oldest, _ = block_times(key)
                within = near[bisect_left(near, (oldest, "")) : bisect_left(near, (newest + 1, ""))]
                if within and (data := self._data(key)) is not None:
                    there = find_in_block(key, data, [token for _, token in within])
                    found.update({token: Remembered(*what) for token, what in there.items()})
        return found

    def _data(self, block_key: bytes) -> bytes | None:
        """None: the block has been trimmed since its key was read; both go in one batch."""
        value = self._engine.get(token_data_key(block_key))
        if value is None and self._engine.get(block_key) is not None:
            raise DataLoss(f"the tokens of the block at key 0x{block_key.hex()} are missing: restore a backup")
        return value

    def known(self, tokens: Sequence[str], now_us: int) -> set[str]:
        """The tokens, of these, that ``find`` knows or ``check_age`` refuses."""
        oldest, requests = now_us - self._ttl_us, self._requests
        new_us = max(self._saved_us, oldest)
        if are_regular(tokens) and 0 <= new_us < _DATED_US_MAX and min(tokens) >= library_prefix(new_us + 1):
            return set() if requests.keys().isdisjoint(tokens) else {token for token in tokens if token in requests}
        found, others = set[str](), list[str]()
        for token in tokens:
            if _dated_us(token) <= new_us:
                others.append(token)
            elif token in requests:
                found.add(token)
        if others:
            stored = self._engine.get_many([token_key(token) for token in others])
            left = list[str]()
            for token, raw in zip(others, stored, strict=True):
                issued = issued_at_us(token)
                if raw is not None or token in requests or (issued is not None and issued < oldest):
                    found.add(token)
                else:
                    left.append(token)
            found.update(self._in_blocks(left))
        return found

    def remember(self, token: str, cts: int, digest: bytes, members: int = 1) -> None:
        """The token's commit, or its ``members`` from ``cts`` on, are finished; or it is fenced."""
        if members > 1:
            self._queue(_Group(cts, [token], [digest], members))
            self._growing = None
            return
        group = self._growing
        if group is not None and cts == group.first + len(group.tokens) and len(group.tokens) < _GROUP_MAX:
            group.tokens.append(token)
            group.digests.append(digest)
            self._requests[token] = group
            self._newest = max(self._newest, cts)
            return
        self.remember_many((token,), cts, (digest,))
        is_last = cts != FENCED and bool(self._queued) and self._queued[-1].first == cts
        self._growing = self._queued[-1] if is_last else None

    def remember_many(self, tokens: Sequence[str], first_cts: int, digests: Sequence[bytes]) -> None:
        """``remember`` for commits with consecutive CTS."""
        self._queue(_Group(first_cts, [*tokens], [*digests]))

    def _queue(self, group: _Group) -> None:
        self._requests.update(zip(group.tokens, repeat(group)))
        if group.first >= self._newest:
            self._newest = group.last
            self._queued.append(group)
        else:
            self._late.append(group)

    def forget(self, token: str) -> None:
        """The commit that carried it aborted after it had taken a CTS: the token is fenced with it."""
        group = self._requests.get(token)
        if group is not None and group.first != FENCED:
            self._stale.add(token)
        self.remember(token, FENCED, bytes(16))

    # -- batch tokens ---------------------------------------------------------------------------

    def find_batch(self, scope: str, sequence: int) -> int | None:
        """The first CTS of this batch, or None if it is the next one. Raises OutOfSequence for a gap."""
        high = self._high.get(scope)
        if high is not None and sequence <= high:
            self.hits += 1
            cts = self._batches.get((scope, sequence))
            if cts is None and (raw := self._engine.get(batch_key(scope, sequence))) is not None:
                cts = int.from_bytes(raw, "little")
            if cts is None:
                raise OutOfSequence(
                    f"batch {sequence} of {scope!r} lies before the first one that was committed here",
                    expected=high + 1,
                )
            return cts
        if high is not None and sequence != high + 1:
            raise OutOfSequence(f"batch {sequence} of {scope!r} leaves a gap after {high}", expected=high + 1)
        return None

    def remember_batch(self, scope: str, sequence: int, cts: int) -> None:
        self._batches[scope, sequence] = cts
        self._high[scope] = max(sequence, self._high.get(scope, sequence))

    def forget_batch(self, scope: str, sequence: int) -> None:
        """The commit aborted after it had taken a CTS; only ever the newest of its scope."""
        self._batches.pop((scope, sequence), None)
        if self._high.get(scope) == sequence:
            if (scope, sequence - 1) in self._batches or self._engine.get(batch_key(scope, sequence - 1)) is not None:
                self._high[scope] = sequence - 1
            else:
                del self._high[scope]

    def scopes(self, prefix: str = "") -> list[str]:
        """The scopes that batches were committed under."""
        return sorted(scope for scope in tuple(self._high) if scope.startswith(prefix))

    def committed_at(self, token: str | None, batch: tuple[str, int] | None) -> int | None:
        """The CTS of the commit that carried one of these, or None. A gap or a fence is None too."""
        if token is not None and (found := self.find(token)) is not None and found.cts != FENCED:
            return found.cts
        if batch is not None and batch[1] <= self._high.get(batch[0], -1):
            return self.find_batch(*batch)
        return None

    # -- persistence ----------------------------------------------------------------------------

    def take(self, upto: int, limit: int) -> Taken:
        """About ``limit`` request tokens of commits at or below ``upto`` that were not taken yet; none: that is all.

        Fences are always among them. They are to be written (`rows`), and then dropped, or put back.
        """
        self._growing = None
        late, self._late = self._late, []
        groups: list[_Group] = []
        count, queued = 0, self._queued
        for group in late:
            if count < limit:
                count += self._take(group, upto, limit - count, groups, self._late.append)
            else:
                self._late.append(group)
        while queued and queued[0].first <= upto and count < limit:
            count += self._take(queued.popleft(), upto, limit - count, groups, queued.appendleft)
        names = [token for group in groups for token in group.tokens]
        is_regular = are_regular(names) and all(group.is_plain for group in groups)
        newest = issued_us(max(names)) if is_regular else max(map(_dated_us, names), default=0)
        self._saved_us = max(self._saved_us, newest)
        return Taken(groups, is_regular)

    def _take(self, group: _Group, upto: int, limit: int, into: list[_Group], keep: Callable[[_Group], object]) -> int:
        """Its first ``limit`` that are at or below ``upto``. How many of them are the last word on their token."""
        count = min(limit, upto - group.first + 1, len(group.tokens))
        if count <= 0 or (group.members > 1 and group.last > upto):
            keep(group)
            return 0
        if count < len(group.tokens):
            group, rest = group.part(0, count), group.part(count, len(group.tokens))
            keep(rest)
        if group.first == FENCED or self._stale.isdisjoint(group.tokens):
            taken = [group]
        else:  # seldom: the others one by one
            taken = [group.part(i, i + 1) for i, token in enumerate(group.tokens) if token not in self._stale]
            self._stale.difference_update(group.tokens)
        into += taken
        return sum(len(each.tokens) for each in taken)

    def put_back(self, taken: Taken) -> None:
        """They could not be written, and are to be taken again."""
        self._late += taken.groups

    def drop(self, taken: Taken) -> None:
        """They are in the engine now. A fence that came in between is not, and stays."""
        for group in taken.groups:
            is_fence, requests = group.first == FENCED, self._requests
            for token in group.tokens:
                if is_fence or token not in self._stale:
                    requests.pop(token, None)
                else:
                    self._stale.discard(token)

    @staticmethod
    def rows(pieces: Iterable[Taken]) -> Iterator[tuple[bytes, bytes]]:
        """Engine rows, of all that one pass has taken. Needs no lock."""
        names, stamps, digests = list[str](), list[int](), list[bytes]()
        for taken in pieces:
            for group in taken.groups:
                if group.members > 1:
                    yield token_key(group.tokens[0]), Remembered(group.first, group.digests[0], group.members).encode()
                    continue
                if taken.is_regular or (group.is_plain and are_regular(group.tokens)):
                    names += group.tokens
                    stamps += group.stamps
                    digests += group.digests
                    continue
                for found in zip(group.tokens, group.stamps, group.digests, strict=True):
                    if found[1] != FENCED and are_regular(found[:1]):
                        names.append(found[0])
                        stamps.append(found[1])
                        digests.append(found[2])
                    else:
                        yield token_key(found[0]), Remembered(*found[1:]).encode()
        yield from encode_blocks(names, stamps, digests)

    def batch_rows(self, upto: int) -> list[tuple[bytes, bytes]]:
        """Engine rows for the batch tokens of commits at or below ``upto``."""
        rows = []
        for (scope, sequence), cts in self._batches.items():
            if cts <= upto:
                rows.append((batch_key(scope, sequence), cts.to_bytes(8, "little")))
                rows.append((meta_key(_SCOPE + scope), sequence.to_bytes(8, "little")))
        return rows

    def drop_batches(self, upto: int) -> None:
        """The rows that ``batch_rows`` gave are in the engine now."""
        for batch in [batch for batch, cts in self._batches.items() if cts <= upto]:
            del self._batches[batch]

    def trim(self, now_us: int, limit: int) -> WriteBatch | None:
        """Deletes up to ``limit`` rows of library tokens past their time limit, or some blocks; None: nothing to do."""
        before_us = max(0, now_us - self._ttl_us)
        low = token_key(library_prefix(0)[:3])
        high = token_key(library_prefix(before_us))
        batch = WriteBatch()
        blocks = self._engine.scan(token_blocks_from(0), token_blocks_from(before_us))
        for key, _ in islice(blocks, limit // 2):
            batch.delete(key)
            batch.delete(token_data_key(key))
        for key, _ in self._engine.scan(low, high):
            if len(batch) >= limit:
                break
            issued = issued_at_us(key[1:].decode())  # None: a caller's own token that only looks like one of ours
            if issued is not None and issued < now_us - self._ttl_us:
                batch.delete(key)
        return batch if len(batch) else None

    def check(self) -> int:
        """Decodes every block of the engine, which is whole; how many tokens they hold. Raises DataLoss."""
        blocks, data = space_prefix(Space.TOKENS), space_prefix(Space.TOKEN_DATA)
        known = deque(token_data_key(key) for key, _ in self._engine.scan(blocks, prefix_end(blocks)))
        count = 0
        for key, value in self._engine.scan(data, prefix_end(data)):
            if not known or key != known.popleft():
                raise DataLoss(f"the tokens at key 0x{key.hex()} belong to no block: restore a backup")
            count += len(decode_block(key, value))
        if known:
            raise DataLoss(f"the tokens of a block are missing at key 0x{known[0].hex()}: restore a backup")
        return count

    @property
    def unsaved(self) -> int:
        return len(self._requests) + len(self._batches)
