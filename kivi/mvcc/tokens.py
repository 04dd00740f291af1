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
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kivi.engine import Engine, WriteBatch
from kivi.errors import InvalidArgument, OutOfSequence
from kivi.keys import prefix_end
from kivi.spaces import batch_key, meta_key, token_key

__all__ = ["FENCED", "Remembered", "Taken", "Tokens", "issued_at_us"]

FENCED: Final = 0
"""The CTS of a token that will never commit."""

_VALUE: Final = struct.Struct("<Q16s")
_SCOPE: Final = "scope/"
_IRREGULAR_MAX: Final = 100
_NEVER_US: Final = 1 << 63


class Remembered(NamedTuple):
    cts: int
    digest: bytes


Taken = tuple[str, Remembered]
"""A request token that is on its way to the engine."""


def issued_at_us(token: str) -> int | None:
    """The time of issue of a token that the client library made, else None."""
    if token.startswith("k1-"):
        head, _, _ = token[3:].partition("-")
        if head.isdecimal() and len(head) <= 19:
            return int(head)
    return None


def library_prefix(issued_us: int) -> str:
    return f"k1-{issued_us:016d}-"


def _regular_us(token: str) -> int:
    """The time of issue of a token that sorts by it among its like, as all of the library's do; else 0."""
    issued = token[3:19]
    if token[:3] == "k1-" and token[19:20] == "-" and issued.isascii() and issued.isdigit():
        return int(issued)
    return 0


def _newest_us(engine: Engine) -> int:
    """The time of issue of the newest regular token in the engine, or a later one. 0 if there is none."""
    prefix = token_key(library_prefix(0)[:3])
    for i, (key, _) in enumerate(engine.scan(prefix, prefix_end(prefix), reverse=True)):
        if issued := _regular_us(key[1:].decode(errors="replace")):
            return issued
        if i == _IRREGULAR_MAX:
            return _NEVER_US
    return 0


class Tokens:
    """``ttl_us`` bounds how long library tokens are remembered."""

    def __init__(self, engine: Engine, *, ttl_us: int) -> None:
        self._engine = engine
        self._ttl_us = ttl_us
        self._requests: dict[str, Remembered] = {}
        self._batches: dict[tuple[str, int], int] = {}
        self._high: dict[str, int] = {}
        # Of the requests, what was not taken yet: as their CTS ascend, and those that came behind a later one.
        self._queued: deque[Taken] = deque()
        self._late: list[Taken] = []
        self._newest = 0
        # No regular token that was issued later is in the engine, so that new ones need not be looked for there.
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
        found = self._requests.get(token)
        if found is None and (raw := self._engine.get(token_key(token))) is not None:
            found = Remembered(*_VALUE.unpack(raw))
        if found is not None:
            self.hits += 1
        return found

    def known(self, tokens: Iterable[str], now_us: int) -> set[str]:
        """Those about which ``find`` or ``check_age`` would have something to say."""
        oldest, requests = now_us - self._ttl_us, self._requests
        new_us = max(self._saved_us, oldest)
        found, others = set[str](), list[str]()
        for token in tokens:
            if _regular_us(token) <= new_us:
                others.append(token)
            elif token in requests:
                found.add(token)
        if others:
            stored = self._engine.get_many([token_key(token) for token in others])
            for token, raw in zip(others, stored, strict=True):
                issued = issued_at_us(token)
                if raw is not None or token in requests or (issued is not None and issued < oldest):
                    found.add(token)
        return found

    def remember(self, token: str, cts: int, digest: bytes) -> None:
        found = self._requests[token] = Remembered(cts, digest)
        if cts >= self._newest:
            self._newest = cts
            self._queued.append((token, found))
        else:
            self._late.append((token, found))

    def remember_many(self, tokens: Sequence[str], first_cts: int, digests: Sequence[bytes]) -> None:
        """``remember`` for commits with consecutive CTS."""
        for cts, (token, digest) in enumerate(zip(tokens, digests, strict=True), first_cts):
            self.remember(token, cts, digest)

    def forget(self, token: str) -> None:
        """The commit that carried it aborted after it had taken a CTS: the token is fenced with it."""
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

    def take(self, upto: int, limit: int) -> list[Taken]:
        """About ``limit`` request tokens of commits at or below ``upto`` that were not taken yet; none: that is all.

        Fences are always among them. They are to be written (`rows`), and then dropped, or put back.
        """
        requests, queued = self._requests, self._queued
        late, self._late = self._late, []
        out: list[Taken] = []
        for taken in late:
            if taken[1].cts > upto:
                self._late.append(taken)
            elif requests.get(taken[0]) is taken[1]:
                out.append(taken)
        while queued and queued[0][1].cts <= upto and len(out) < limit:
            taken = queued.popleft()
            if requests.get(taken[0]) is taken[1]:  # else it was fenced since, which is to be the last word
                out.append(taken)
        self._saved_us = max([self._saved_us, *(_regular_us(token) for token, _ in out)])
        return out

    def put_back(self, taken: Iterable[Taken]) -> None:
        """They could not be written, and are to be taken again."""
        self._late.extend(taken)

    def drop(self, taken: Iterable[Taken]) -> None:
        """They are in the engine now. A fence that came in between is not, and stays."""
        for token, found in taken:
            if self._requests.get(token) is found:
                del self._requests[token]

    @staticmethod
    def rows(taken: Iterable[Taken]) -> Iterator[tuple[bytes, bytes]]:
        """Engine rows. Needs no lock."""
        for token, (cts, digest) in taken:
            yield token_key(token), _VALUE.pack(cts, digest)

    def batch_rows(self, upto: int) -> list[tuple[bytes, bytes]]:
        """Engine rows for the batch tokens of commits at or below ``upto``."""
        rows = []
        for (scope, sequence), cts in self._batches.items():
            if cts <= upto:
                rows.append((batch_key(scope, sequence), cts.to_bytes(8, "little")))
                rows.append((meta_key(_SCOPE + scope), sequence.to_bytes(8, "little")))
        return rows

    def drop_batches(self, upto: int) -> None:
        """What ``batch_rows`` gave is in the engine now."""
        for batch in [batch for batch, cts in self._batches.items() if cts <= upto]:
            del self._batches[batch]

    def trim(self, now_us: int, limit: int) -> WriteBatch | None:
        """Deletes up to ``limit`` library tokens past their time limit; None if there is nothing to do."""
        low = token_key(library_prefix(0)[:3])
        high = token_key(library_prefix(max(0, now_us - self._ttl_us)))
        batch = WriteBatch()
        for key, _ in self._engine.scan(low, high):
            issued = issued_at_us(key[1:].decode())  # None: a caller's own token that only looks like one of ours
            if issued is not None and issued < now_us - self._ttl_us:
                batch.delete(key)
            if len(batch) >= limit:
                break
        return batch if len(batch) else None

    @property
    def unsaved(self) -> int:
        return len(self._requests) + len(self._batches)
