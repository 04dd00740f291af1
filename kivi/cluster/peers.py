"""The servers of the log as a part of the nodes: each node runs one, and these are one another's peers.

::

    --peers a:7430,b:7430,c:7430     the same list on every node: where the servers reach one another
    --peer a:7430                    which of them is this node's, where that is not plain

The server's files are in ``nats-server`` in the node's directory, which no copy of the node has. Its only client, the
node, reaches it on loopback. Two peers would be worse than one: both are needed for a majority.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kivi.cluster.joining import Joining
from kivi.cluster.streams import ROOM_BYTES, stream_of
from kivi.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from kivi.log.certificates import Certificates
from kivi.log.jetstream import COPIES_MAX, JetStream
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, Peers, free_ports
from kivi.store.opening import LOG_SERVER, check_node

__all__ = ["PeerServer", "address_of", "own_peer", "peers_of", "secret_of"]

_WAIT_S: Final = 0.5
_SAY_S: Final = 10.0
_REFUSED_S: Final = 10.0
_SECRET_MIN: Final = 16
_EVERYWHERE: Final = "0.0.0.0"  # the routes know a secret


def peers_of(text: str) -> list[str]:
    """The addresses of a list with commas. Raises InvalidArgument for two of them, for one twice, for no address."""
    peers = [each.strip() for each in text.split(",")]
    for peer in peers:
        address_of(peer)
    if twice := sorted({peer for peer in peers if peers.count(peer) > 1}):
        raise InvalidArgument(f"--peers names {twice[0]} twice")
    if len(peers) == 2:
        raise InvalidArgument(
            "--peers names two, and two servers keep no log when either is away: name three, or one to begin alone"
        )
    return peers


def address_of(peer: str) -> tuple[str, int]:
    """Host and port. Raises InvalidArgument."""
    host, _, port = peer.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) <= 65_535:
        raise InvalidArgument(f"--peers has {peer!r}, which is not host:port")
    return host.strip("[]"), int(port)


def own_peer(peers: Sequence[str], told: str | None = None) -> str:
    """Which of the peers is this node's: the one that was ``told``, or else the only one at an address of this machine.

    Raises InvalidArgument if there is none, or more than one.
    """
    if told is not None:
        if told not in peers:
            raise InvalidArgument(f"--peer {told} is none of --peers {','.join(peers)}: write it as it is there")
        return told
    here = [peer for peer in peers if _is_here(address_of(peer)[0])]
    if len(here) == 1:
        return here[0]
    found = f"{' and '.join(here)} are addresses" if here else "none is an address"
    raise InvalidArgument(f"of --peers {','.join(peers)} {found} of this machine: say which is this node's with --peer")


def _is_here(host: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def secret_of(path: str) -> str:
    """What the file says in its one line. Raises InvalidArgument for a file that cannot be read, or is no secret."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidArgument(f"cannot read the cluster's secret in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"the cluster's secret in {path} is not UTF-8 text") from None
    if len(secret) < _SECRET_MIN or not secret.isprintable():
        raise InvalidArgument(
            f"the cluster's secret in {path} is not one line of at least {_SECRET_MIN} characters: "
            "openssl rand -hex 32 makes one"
        )
    return secret


class PeerServer:
    """The log's server of one node. Nothing runs before ``start``; ``login`` and ``copies`` are for whoever opens
    streams of it.

    ``data``: the node's directory. ``own``: which of the ``peers`` it is. ``log_bytes``: how large the
    stream may become. ``secret`` and ``tls``: what the servers know one another by; None is for a network that is
    trusted.

    Raises InvalidArgument if there is no nats-server here, for a certificate that its peers would not take, or, as
    ``check_node``, for a directory that cannot be a node's.
    """

    def __init__(
        self,
        data: str,
        cluster: str,
        peers: Sequence[str],
        own: str,
        secret: str | None,
        *,
        log_bytes: int,
        tls: Certificates | None = None,
    ) -> None:
        check_node(data, cluster)
        if tls is not None:
            tls.check()
        self.cluster, self.peers, self.own, self._log_bytes = cluster, list(peers), own, log_bytes
        self.copies = COPIES_MAX if len(peers) >= COPIES_MAX else 1
        host, port = address_of(own)
        (client,) = free_ports(1)
        self.server = NatsServer(
            Path(data, LOG_SERVER).absolute(),
            name=own,
            listen=f"127.0.0.1:{client}",
            peers=Peers(f"kivi-{cluster}", f"{_listened(host)}:{port}", peers, secret),
            max_bytes=log_bytes + ROOM_BYTES,
            password=secrets.token_hex(16),  # for this node alone, until the next start
            tls=tls,
        )
        self.login = self.server.login
        self._joining = Joining(self.server, peers, stream_of(cluster))
        self._refused: dict[str, tuple[float, str, float]] = {}
        """Peers that it has called in vain: since when, why, and when last."""
        self._alone_since = -math.inf

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        """Raises Unavailable if it does not run, StoreInUse if another process has the directory."""
        self._joining.start()

    def missing(self) -> list[str]:
        """The peers that it is not connected to."""
        if len(self.peers) == 1:
            return []
        heard = self.server.heard()
        return [peer for peer in self.peers if peer != self.own and peer not in heard]

    def wait(self, say: Callable[[str], None]) -> None:
        """Until the stream can be read and written, or made, for which all peers have to be there. Meanwhile says what
        is missing, when that changes and every ten seconds. Raises InvalidArgument if the stream is another's,
        Unauthenticated if peers and this one have not known one another for ten seconds, and nobody else is there."""
        said, said_at = "", 0.0
        while lacks := self._lacks():
            now = time.monotonic()
            self._check_refusals(now)
            if lacks != said or now - said_at > _SAY_S:
                say(f"waiting for the log of {self.cluster}: {lacks}")
                said, said_at = lacks, now
            time.sleep(_WAIT_S)

    def _lacks(self) -> str:
        """What keeps the stream from being there; "" if nothing does."""
        try:
            missing = self.missing()
            if lacks := self._joining.look(missing):
                return lacks + self._why(missing)
        except Unavailable as error:
            return error.message
        away = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there"
        away += self._why(missing)
        try:
            with contextlib.closing(Nats([self.url], timeout_s=5.0, **self.login)) as nats:
                JetStream(
                    nats,
                    stream_of(self.cluster),
                    max_bytes=self._log_bytes,
                    room_bytes=ROOM_BYTES,
                    copies=self.copies,
                    create=False,
                    timeout_s=_WAIT_S,
                ).close()
        except NotFound:
            return f"{away}, and the first start needs all" if missing else ""
        except Unavailable as error:
            if 2 * len(missing) >= len(self.peers):
                return away
            if missing:
                return f"{away}: the others have no leader yet, or this is the first start, which needs all"
            return f"its servers have no leader yet ({self.server.problem or error.message})"
        return ""

    def _why(self, missing: Sequence[str]) -> str:
        known = [f"{peer}: {self._refused[peer][1]}" for peer in missing if peer in self._refused]
        return f" ({', '.join(known)})" if known else ""

    def _check_refusals(self, now: float) -> None:
        """Raises Unauthenticated."""
        for at, why in self.server.refusals():
            for peer in self.peers:
                if peer != self.own and at in _resolved(peer):
                    since, _, _ = self._refused.get(peer, (now, "", now))
                    self._refused[peer] = since, why, now
        with contextlib.suppress(Unavailable):
            missing = self.missing()
            self._refused = {
                peer: (since, why, last)
                for peer, (since, why, last) in self._refused.items()
                if peer in missing and now - last < _REFUSED_S
            }
            if len(missing) < len(self.peers) - 1:
                self._alone_since = now
            for peer, (since, why, _) in self._refused.items():
                if now - max(since, self._alone_since) > _REFUSED_S:
                    raise Unauthenticated(
                        f"{peer} and this node do not know one another: {why}; all of --peers need the same "
                        "--cluster-secret-file, and certificates that the --cluster-ca of the others has signed"
                    )

    def stop(self) -> None:
        """Hands over what it leads, and ends it. Idempotent."""
        self._joining.stop()


def _resolved(peer: str) -> set[str]:
    """The addresses of a peer, as servers write them."""
    host, port = address_of(peer)
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return {f"[{at[0]}]:{port}" if family == socket.AF_INET6 else f"{at[0]}:{port}" for family, *_, at in found}
    return set()


def _listened(host: str) -> str:
    """An address is listened at as it is. A name is what others call this machine, and may mean loopback here."""
    if host == "localhost":
        return host
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return f"[{host}]" if family == socket.AF_INET6 else host
    return _EVERYWHERE
