"""The group of servers that knows which streams there are, and which servers have the copies: JetStream's meta group.

A server that stores anything is a member, and has a vote. Most members have to be there for anything to be decided, so
one that is gone for good is *removed*; what it had a copy of, the leader then places on another one. Asking and
removing is for operators (``NatsServer.admin``).

Members have numbers, which are made of their names. A server that was started while another one was away knows that one
by its number alone, and says so where its name should be; whoever knows the names knows which one it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import string
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import Unavailable
from kivi.log.natslink import Nats

__all__ = ["Group", "find_group", "remove_server", "server_named"]

_ANSWER_S: Final = 2.0
_AGAIN_S: Final = 0.2
_NAMELESS: Final = re.compile(r"Server name unknown .*\(peerID: (\w+)\)")
_DIGITS: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Group:
    """``members`` by name, the leader too; whether they are there it learns late."""

    leader: str
    members: frozenset[str]


def server_named(said: str, known: Iterable[str]) -> str:
    """The name of a server, of which JetStream may have said that it does not know it. ``known``: all that are."""
    if (nameless := _NAMELESS.fullmatch(said)) is None:
        return said
    found = (name for name in known if _number_of(name) == nameless[1])
    return next(found, f"unknown (number {nameless[1]}, not heard since the others were started)")


def _number_of(name: str) -> str:
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in hashlib.sha256(name.encode()).digest()[:8])


def find_group(nats: Nats, known: Collection[str]) -> Group | None:
    """As its leader says; None if none is heard. ``known``: names of servers that it may have lost. Raises Unavailable
    if the server that was asked does not answer."""
    request = json.dumps({"leader_only": True}).encode()
    work = nats.link.request_many("$SYS.REQ.SERVER.PING.JSZ", request, _ANSWER_S, is_last=_is_leader)
    with contextlib.suppress(TimeoutError, Unavailable):
        for message in nats.call(work, _ANSWER_S + 1):
            if (about := _about(message)) is not None:
                others = (server_named(one["name"], known) for one in about.get("replicas") or ())
                return Group(about["leader"], frozenset([about["leader"], *others]))
    return None


def _is_leader(message: Any) -> bool:
    return _about(message) is not None


def _about(message: Any) -> dict[str, Any] | None:
    answer = json.loads(message.data)
    about: dict[str, Any] = (answer.get("data") or {}).get("meta_cluster") or {}
    return about if about.get("leader") and about["leader"] == answer["server"]["name"] else None


def remove_server(nats: Nats, name: str, timeout_s: float) -> None:
    """Ends its membership, for good: a server of this name begins anew. Raises Unavailable."""
    deadline = time.monotonic() + timeout_s
    payload = json.dumps({"peer": name, "peer_id": _number_of(name)}).encode()
    while True:
        try:
            work = nats.link.request("$JS.API.SERVER.REMOVE", payload, _ANSWER_S)
            answer = json.loads(nats.call(work, _ANSWER_S + 1).data)
            if "error" not in answer:
                return
            why = answer["error"].get("description", "")  # another change is on its way, for example
        except Unavailable as error:
            why = error.message
        if time.monotonic() > deadline:
            raise Unavailable(f"the servers of the log do not remove {name}: {why}")
        time.sleep(_AGAIN_S)
