"""Which node of a cluster a subscription of this client is placed at.

::

    connected to "a,b,c"   each new one at the node of these that has the fewest of this client's
    a node refuses         it holds a part of the shards, and says which nodes hold all that the query needs: there
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
from kivi.errors import KiviError

__all__ = ["holders_of", "least_loaded", "place_of", "was_lost"]

_SHUNNED_S: Final = 5.0


def holders_of(error: KiviError) -> list[str]:
    """Where to ask for what a node of a cluster does not hold, if that is what the error says."""
    return [address for address in error.details.get("addresses") or () if ":" in address]


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
