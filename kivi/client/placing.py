"""Which node of a cluster a subscription of this client is placed at.

::

    connected to "a,b,c"   each new one at the node of these that has the fewest of this client's
    a node refuses         it holds a part of the shards, and says which nodes hold all that the query needs: there, or
                           where those send it
    a node is lost         its subscriptions begin again at the others, at the state that they have; for some seconds
                           none is placed there

So matching, windows and messages of a client's subscriptions are spread over the nodes (*query shards*). Durable ones
are placed where the session is: of two that have one name the later ends the earlier, which a node knows of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from kivi.client.core import Core
from kivi.errors import KiviError, Unavailable

__all__ = ["Trail", "holders_of", "least_loaded", "place_of", "was_lost"]

_SHUNNED_S: Final = 5.0


def holders_of(error: KiviError) -> list[str]:
    """Where to ask for what a node of a cluster does not hold, if that is what the error says."""
    return [address for address in error.details.get("addresses") or () if ":" in address]


class Trail:
    """The nodes that were asked for one thing, each of which has named the next: none twice, and none once the deadline
    has passed. ``first`` was asked first."""

    def __init__(self, first: str, deadline: float) -> None:
        self._asked, self.deadline = [first], deadline

    def went_to(self, address: str) -> None:
        self._asked.append(address)

    def named_by(self, refused: KiviError) -> list[str]:
        """Those that it names and that were not asked. Raises it if it names none; Unavailable, with all that it says
        and who was asked, if there is none left, or no time."""
        named = holders_of(refused)
        if not named:
            raise refused
        left = [address for address in named if address not in self._asked]
        if left and time.monotonic() < self.deadline:
            return left
        why = "the time is up" if left else "it names none that was not asked"
        raise Unavailable(f"{refused.message}; asked in turn: {', '.join(self._asked)}, and {why}", **refused.details)


def place_of(core: Core, *, is_durable: bool) -> str:
    """Where to begin a subscription; "" is the server of the session."""
    if is_durable:
        return ""
    addresses = [address.strip() for address in core.endpoint.split(",")]
    return core.subscriptions_at if len(addresses) == 1 else least_loaded(core, addresses)


def least_loaded(core: Core, addresses: Sequence[str]) -> str:
    """Of these nodes one that was not lost lately, if there is one, and that has the fewest of this client's."""
    now = time.monotonic()

    def cost(address: str) -> tuple[bool, int, float]:
        is_shunned = now - core.lost_at.get(address, -_SHUNNED_S) < _SHUNNED_S
        return is_shunned, core.transport.lines_at(address).load, random.random()

    return min(addresses, key=cost)


def was_lost(core: Core, address: str) -> None:
    """Its stream broke, or it did not answer: the server of a process of subscriptions knows where the next one is."""
    if address:
        core.lost_at[address] = time.monotonic()
        core.subscriptions_at = ""
