"""How a node's server of the log gets a vote among its peers, once in its life.

::

    alone     --peers names this server only: a group of one, which others can join
    first     nobody has a log: all of --peers have met, and begin one together
    joins     there is a group, and it has a leader: one server after the other, in the order of --peers

**Invariant: there is one group.** A server that has no vote yet stores nothing, and so elects nobody, until it has seen
a leader of the group, or all of its peers, of which none has one. Two new servers that met while the old ones were away
would otherwise be a majority of three, and begin another log; and the old ones, joining that, would delete theirs. One
joins after the other, so that two cannot elect a leader when the old ones go away at that very moment. That it has a
vote is noted in ``nats-server/member``, and ``Joining.look`` looks no more.

JetStream makes no group of one by itself: it asks for two servers at least, and for a connection to another one
whenever it starts. So a server alone has a *companion*: another nats-server on this machine. It has a vote until there
is a leader, is removed, and from then on stores nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from kivi.errors import InvalidArgument
from kivi.log.natsgroup import Group, find_group, remove_server
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, Peers, free_ports

__all__ = ["Joining"]

_REMOVE_S: Final = 5.0
_META: Final = ("store", "jetstream", "$SYS", "_js_", "_meta_")


class Joining:
    """Of one server; ``start`` and ``stop`` are those of the server, and of its companion.

    Raises InvalidArgument for a log that an earlier version began alone, and that is to have peers now.
    """

    def __init__(self, server: NatsServer, peers: Sequence[str], stream: str) -> None:
        self._server, self._peers, self._own = server, list(peers), server.name
        self._marker = server.directory / "member"
        store = server.directory / "store" / "jetstream"
        has_copy = (store / "$G" / "streams" / stream).exists()
        self.is_member = self._marker.exists() or has_copy
        self._met = {self._own}
        self._companion: NatsServer | None = None
        if has_copy and not server.directory.joinpath(*_META).exists():
            if len(self._peers) > 1:
                raise InvalidArgument(
                    f"the log in {server.directory} was begun by an earlier version, which kept it without peers: "
                    "stop the node, begin a new log with it by kivi cluster reseed, and others with copies of it"
                )
            server.peers = None
        elif len(self._peers) == 1:
            self._companion = self._made_companion(server)

    @staticmethod
    def _made_companion(server: NatsServer) -> NatsServer:
        assert server.peers is not None
        client, route = free_ports(2)
        return NatsServer(
            server.directory / "companion",
            name=f"{server.name}/companion",
            listen=f"127.0.0.1:{client}",
            peers=Peers(server.peers.name, f"127.0.0.1:{route}", server.peers.routes, server.peers.secret),
            max_bytes=1 << 20,
            password=server.login["password"],
            tls=server.tls,
        )

    def start(self) -> None:
        self._server.jetstream = self.is_member or len(self._peers) == 1
        self._server.start()
        if self._companion is not None:
            self._companion.jetstream = not self.is_member
            self._companion.start()

    def stop(self) -> None:
        self._server.stop()
        if self._companion is not None:
            self._companion.kill()

    def look(self, missing: Sequence[str]) -> str:
        """What keeps it from its vote now; "" once it has it. ``missing``: the peers that it does not hear. Raises
        Unavailable."""
        if self.is_member:
            return ""
        with contextlib.closing(Nats([self._server.url], timeout_s=5.0, **self._server.admin)) as nats:
            group = find_group(nats, self._peers)
            if group is not None and self._server.jetstream and self._own in group.members:
                if lacks := self._leave_alone(nats, group):
                    return lacks
                self._note()
                return ""
        if self._server.jetstream:
            return "its servers have no leader yet"
        self._met.update(set(self._peers) - set(missing))
        if lacks := self._waits(group, missing):
            return lacks
        self._server.kill()  # it has stored nothing
        self._server.jetstream = True
        self._server.start()
        return "this server joins the others"

    def _waits(self, group: Group | None, missing: Sequence[str]) -> str:
        away = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there"
        if group is None:
            if self._met == set(self._peers):
                return ""
            if 2 * len(missing) >= len(self._peers):
                return away
            return f"{away}: the others have no leader yet, or this is the first start, which needs all"
        if self._own in group.members:  # its directory is lost: what it has voted for it does not know
            return f"{away}, and a server that has lost its files begins again once all are" if missing else ""
        before = self._peers[: self._peers.index(self._own)]
        joining = [peer for peer in before if peer not in missing and peer not in group.members]
        return f"{joining[0]} joins first" if joining else ""

    def _leave_alone(self, nats: Nats, group: Group) -> str:
        """Makes it a group of one, if it is to be that."""
        if self._companion is None:
            return ""
        if self._companion.name in group.members:
            remove_server(nats, self._companion.name, _REMOVE_S)
            return "its server begins a log"
        return ""

    def _note(self) -> None:
        self._marker.touch()
        self.is_member = True
        if self._companion is not None:
            self._companion.kill()
            self._companion.jetstream = False
            self._companion.start()
