"""Reads that a node of a cluster cannot answer, and where they go on: at a node that it names, as steps.

A node refuses what it has not all shards of, or what is to be newer than it can say that it is, and names others
(``error.details["addresses"]``). One of those may refuse as well, and name others still: they are asked in turn, none
twice, as long as the call has time (``Trail``).

What a snapshot holds to (R1, R17)
----------------------------------
* Its first answer fixes its timestamp and its node, for whoever reads it (``TransactionCore.told``). Until then exactly
  one reader asks, and nothing that another was told can depend on where that leads: so it may move to the node that
  answers. Threads that come meanwhile wait, each for as long as its call has time; tasks have no snapshot before
  ``async with`` has awaited its first answer. From then on nobody waits.
* What its node cannot answer after that is read at the same timestamp elsewhere: under its name, which all nodes know,
  if it is shared. Each other node is told of it once, and it is read there only after that node has said that it is.
* It is renewed at all of them, and for as long where it is first read after that.
* Who closes it says so and then lets go of it everywhere; who has arrived at another node looks again.
* A client has seen what a node has told it by another one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from kivi.api.arguments import GetNowArguments, check_ttl
from kivi.client.calls import Link
from kivi.client.core import Core
from kivi.client.placing import Trail
from kivi.client.steps import Do, Steps
from kivi.client.transaction import SharedSnapshotArguments, TransactionCore
from kivi.errors import InvalidArgument, Unavailable

__all__ = ["AnyNode", "Client", "get_elsewhere", "order_of"]

A = TypeVar("A")
T = TypeVar("T")


class Client(Protocol):
    """Of threads or for asyncio, where what is marked with a star gives something to await."""

    @property
    def _core(self) -> Core: ...

    @property
    def _run(self) -> Callable[[Steps[Any]], Any]:
        """* The result of steps."""

    @property
    def _transport(self) -> Link[Any]: ...

    def _other(self, addresses: Sequence[str], deadline: float, before: Container[str] = ()) -> Any:
        """* The address of the first of these nodes that is reached, in ``order_of``, and a client of it, that has seen
        what this one has. Whoever else looks for a node meanwhile does not wait for this. Raises Unavailable."""


def order_of(
    addresses: Sequence[str], deadline: float, known: Mapping[str, Client], before: Container[str]
) -> Iterator[tuple[str, float]]:
    """These addresses as they are to be tried, each with the seconds for it: an equal part of what is left, so that a
    machine that does not answer leaves some to the next. Those that were used ``before`` are first, and then those with
    a connection."""

    def cost(address: str) -> tuple[bool, bool, float]:
        client = known.get(address)
        return address not in before, client is None or not client._transport.is_reached, random.random()

    for i, address in enumerate(sorted(addresses, key=cost)):
        yield address, max(0.0, deadline - time.monotonic()) / (len(addresses) - i)


def follow(
    client: Client,
    trail: Trail,
    refused: Unavailable,
    ask: Callable[[A], Any],
    arrive: Callable[[str, Any], Steps[A]],
    before: Container[str] = (),
) -> Steps[tuple[A, Any]]:
    """What the first node answers that does, and what ``arrive`` has made of its address and client.

    Raises what the last one said.
    """
    while True:
        address, other = yield Do(partial(client._other, trail.named_by(refused), trail.deadline, before))
        trail.went_to(address)
        try:
            at = yield from arrive(address, other)
            answer = yield Do(partial(ask, at))
        except Unavailable as error:
            refused = error
        else:
            client._core.saw(other._core.seen_ts)
            return at, answer


def get_elsewhere(
    client: Client, deadline: float, refused: Unavailable, wanted: GetNowArguments
) -> Steps[list[dict[str, Any] | None]]:
    """Rows at a snapshot of this read's own, which the node of this client refused."""

    def arrive(address: str, other: Client) -> Steps[Client]:
        yield from ()
        return other

    def ask(other: Client) -> Any:
        return other._run(other._core.get_many(wanted))

    _, rows = yield from follow(client, Trail(client._core.endpoint, deadline), refused, ask, arrive)
    return list(rows)


class AnyNode:
    """What snapshots of both clients are, besides what they are asked: one of one node, and where that does not answer,
    of others."""

    def __init__(self, client: Client, wanted: SharedSnapshotArguments) -> None:
        self._client = client
        self._core = TransactionCore(client._core, wanted)
        self._core.told = self._told
        self._wanted = wanted
        self._is_fixed = False
        """Whether it has answered, or said at which timestamp it is."""
        self._others: dict[str, TransactionCore] = {}
        self._is_closed = False

    @property
    def lease(self) -> bytes:
        """Names a shared snapshot for other processes; empty otherwise."""
        return self._core.lease

    def _told(self) -> None:
        """Its first answer has come."""
        self._is_fixed = True
        self._core.told = None

    def _follow(
        self, deadline: float, refused: Unavailable, steps: Callable[[TransactionCore], Steps[T]]
    ) -> Steps[tuple[TransactionCore, T]]:
        """What its node refused, and where it was answered."""

        def ask(at: TransactionCore) -> Any:
            return at.core.transport.run(steps(at))

        trail = Trail(self._core.core.endpoint, deadline)
        return follow(self._client, trail, refused, ask, self._arrive, self._others)

    def _arrive(self, address: str, other: Client) -> Steps[TransactionCore]:
        """The snapshot at another node, to which it moves if nobody has an answer of it yet."""
        there = self._others.get(address)
        if there is not None:
            return there
        if not (self._is_fixed or self._core.lease):
            self._core.release()
            there = TransactionCore(other._core, self._wanted)
            there.told = self._core.told
            if not there.shared:
                there.begin()
            self._core = there
            self._look_again(there)
            return there
        ts = yield Do(partial(self._core.core.transport.run, self._core.started()))
        wanted = self._wanted.at(ts, self._core.lease, self._core.ttl_s)
        there = TransactionCore(other._core, wanted)
        there.begin()
        try:
            yield Do(partial(other._run, there.started()))
        except BaseException:
            there.release()
            raise
        if (first := self._others.setdefault(address, there)) is not there:  # of another reader
            there.release()
        self._look_again(first)
        return first

    def _look_again(self, there: TransactionCore) -> None:
        """Whether it was closed before it was there, and nobody else has it to close."""
        if self._is_closed:
            there.release()
            raise InvalidArgument("this snapshot has ended")

    def _renew_others(self, ttl_s: float | None) -> None:
        """At the other nodes: no answer is waited for, as one of them may be gone."""
        check_ttl(ttl_s)
        for one in list(self._others.values()):
            one.renew_unasked(ttl_s)

    def _end(self) -> Steps[None] | None:
        """Gives what is left to be waited for, if something is."""
        self._is_closed = True  # first: who arrives elsewhere just now looks again
        for one in list(self._others.values()):
            one.release()
        self._core.told = None
        return self._core.end()
