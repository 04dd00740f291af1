"""The group of servers that knows which streams there are, and which servers have the copies: JetStream's meta group.

A server that stores anything is a member, and has a vote. Most members have to be there for anything to be decided, so
one that is gone for good is *removed*; what it had a copy of, the leader then places on another one. Asking and
removing is for operators (``NatsServer.admin``).
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import Unavailable
from kivi.log.natslink import Nats

__all__ = ["Group", "find_group", "remove_server"]

_ANSWER_S: Final = 2.0
_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Group:
    """``members`` by name, the leader too; whether they are there it learns late."""

    leader: str
    members: frozenset[str]


def find_group(nats: Nats) -> Group | None:
    """As its leader says; None if none is heard. Raises Unavailable if the server that was asked does not answer."""
    request = json.dumps({"leader_only": True}).encode()
    work = nats.link.request_many("$SYS.REQ.SERVER.PING.JSZ", request, _ANSWER_S, is_last=_is_leader)
    with contextlib.suppress(TimeoutError, Unavailable):
        for message in nats.call(work, _ANSWER_S + 1):
            if (about := _about(message)) is not None:
                others = (one["name"] for one in about.get("replicas") or ())
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
    payload = json.dumps({"peer": name}).encode()
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
