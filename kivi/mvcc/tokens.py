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
rebuilt from the log. Many commit between two passes, and nobody commits while the lock is held: so a pass only sets
aside what there is (`cut`), reads it without the lock (`rows`), and drops it once it is in the engine.

In the engine a token has a row. Older versions kept those that the library made in blocks
(``kivi.encoding.token_blocks``), which become rows when a store is opened.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, batch_key, meta_key, space_prefix, token_key
from kivi.encoding.token_blocks import decode_block
from kivi.engine import Engine, WriteBatch
from kivi.errors import InvalidArgument, OutOfSequence

__all__ = ["FENCED", "Remembered", "Tokens", "issued_at_us"]

FENCED: Final = 0
"""The CTS of a token that will never commit."""

_VALUE: Final = struct.Struct("<Q16s")
_CTS_BITS: Final = 44  # of a stored token; above them, how many members it has, less one
_SCOPE: Final = "scope/"
_IRREGULAR_MAX: Final = 100
_AFTER_ALL: Final = "k1-:"


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
        return _packed(*self)


def _packed(cts: int, digest: bytes, members: int) -> bytes:
    return _VALUE.pack(cts | (members - 1) << _CTS_BITS, digest)


def issued_at_us(token: str) -> int | None:
    """The time of issue of a token that the client library made, else None."""
    if token.startswith("k1-"):
        head, _, _ = token[3:].partition("-")
        if head.isdecimal() and len(head) <= 19:
            return int(head)
    return None


def library_prefix(issued_us: int) -> str:
    return f"k1-{issued_us:016d}-"


_is_dated: Final = re.compile("k1-[0-9]{16}-").match
"""Whether a token sorts by its time of issue among its like, as all of the library's do."""


def _newest_dated(engine: Engine) -> str:
    """The last of the dated tokens in the engine, or what sorts after it. Empty if there is none."""
    prefix = token_key(library_prefix(0)[:3])
    for i, (key, _) in enumerate(engine.scan(prefix, prefix_end(prefix), reverse=True)):
        if _is_dated(token := key[1:].decode(errors="replace")):
            return token
        if i == _IRREGULAR_MAX:
            return _AFTER_ALL
    return ""


def _unpack_blocks(engine: Engine) -> None:
    """Makes rows of the tokens that an older version kept in blocks; a row that there is has the last word."""
    blocks = space_prefix(Space.TOKENS)
    for key, _ in engine.scan(blocks, prefix_end(blocks)):
        data_key = space_prefix(Space.TOKEN_DATA) + key[1:]
        saved, batch = decode_block(key, engine.get(data_key) or b""), WriteBatch()
        stored = engine.get_many([token_key(token) for token, _, _ in saved])
        for (token, cts, digest), raw in zip(saved, stored, strict=True):
            if raw is None:
                batch.put(token_key(token), Remembered(cts, digest).encode())
        batch.delete(data_key)
        batch.delete(key)
        engine.write(batch)


class Tokens:
    """``ttl_us`` bounds how long library tokens are remembered."""

    def __init__(self, engine: Engine, *, ttl_us: int) -> None:
        self._engine = engine
        self._ttl_us = ttl_us
        self._requests: dict[str, tuple[int, bytes, int]] = {}
        self._saving: dict[str, tuple[int, bytes, int]] = {}  # what a pass has set aside; the others have the last word
        self._batches: dict[tuple[str, int], int] = {}
        self._high: dict[str, int] = {}
        _unpack_blocks(engine)
        # No dated token after this one is in the engine, so that new ones need not be looked for there.
        self._saved = _newest_dated(engine)
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
        there = self._requests.get(token) or self._saving.get(token)
        if there is not None:
            found = Remembered(*there)
        elif (raw := self._engine.get(token_key(token))) is not None:
            found = Remembered.decode(raw)
        else:
            return None
        self.hits += 1
        return found

    def known(self, tokens: Sequence[str], now_us: int) -> set[str]:
        """The tokens, of these, that ``find`` knows or ``check_age`` refuses."""
        oldest = now_us - self._ttl_us
        old = max(self._saved, library_prefix(max(0, oldest)))
        found = set[str]()
        for there in (self._requests.keys(), self._saving.keys()):
            if not there.isdisjoint(tokens):
                found |= there & {*tokens}
        if others := [token for token in tokens if (token <= old or not _is_dated(token)) and token not in found]:
            stored = self._engine.get_many([token_key(token) for token in others])
            for token, raw in zip(others, stored, strict=True):
                issued = issued_at_us(token)
                if raw is not None or (issued is not None and issued < oldest):
                    found.add(token)
        return found

    def remember(self, token: str, cts: int, digest: bytes, members: int = 1) -> None:
        """The token's commit, or its ``members`` from ``cts`` on, are finished; or it is fenced."""
        self._requests[token] = cts, digest, members

    def remember_many(self, tokens: Sequence[str], first_cts: int, digests: Sequence[bytes]) -> None:
        """``remember`` for commits with consecutive CTS."""
        found = enumerate(zip(tokens, digests, strict=True), first_cts)
        self._requests.update({token: (cts, digest, 1) for cts, (token, digest) in found})

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

    def cut(self) -> None:
        """A pass begins: what is remembered from now on is left to the next one."""
        if self._saving:  # the pass before could not write it
            self._saving.update(self._requests)
            self._requests = {}
        else:
            self._saving, self._requests = self._requests, self._saving

    def rows(self, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """Engine rows for what was set aside of commits at or below ``upto``, and for fences. Needs no lock."""
        for token, (cts, digest, members) in self._saving.items():
            if cts <= upto:
                yield token_key(token), _packed(cts, digest, members)

    def drop(self, upto: int, lock: threading.Lock) -> None:
        """These rows are in the engine now, and those of the batch tokens. Takes the entry lock at its end."""
        later = [item for item in self._saving.items() if item[1][0] > upto]
        newest = max(filter(_is_dated, self._saving), default="")
        with lock:
            self._saved = max(self._saved, newest)
            for token, found in later:
                self._requests.setdefault(token, found)
            self._saving = {}
            for batch in [batch for batch, cts in self._batches.items() if cts <= upto]:
                del self._batches[batch]

    def batch_rows(self, upto: int) -> list[tuple[bytes, bytes]]:
        """Engine rows for the batch tokens of commits at or below ``upto``."""
        rows = []
        for (scope, sequence), cts in self._batches.items():
            if cts <= upto:
                rows.append((batch_key(scope, sequence), cts.to_bytes(8, "little")))
                rows.append((meta_key(_SCOPE + scope), sequence.to_bytes(8, "little")))
        return rows

    def trim(self, now_us: int, limit: int) -> WriteBatch | None:
        """Deletes up to ``limit`` rows of library tokens past their time limit; None: nothing to do."""
        low = token_key(library_prefix(0)[:3])
        high = token_key(library_prefix(max(0, now_us - self._ttl_us)))
        batch = WriteBatch()
        for key, _ in self._engine.scan(low, high):
            if len(batch) >= limit:
                break
            issued = issued_at_us(key[1:].decode())  # None: a caller's own token that only looks like one of ours
            if issued is not None and issued < now_us - self._ttl_us:
                batch.delete(key)
        return batch if len(batch) else None

    def check(self) -> int:
        """Decodes every row of the engine; how many there are."""
        space = space_prefix(Space.TOKEN)
        return sum(1 for _, raw in self._engine.scan(space, prefix_end(space)) if Remembered.decode(raw))

    @property
    def unsaved(self) -> int:
        return len(self._requests) + len(self._saving) + len(self._batches)
