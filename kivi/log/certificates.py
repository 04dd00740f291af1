"""The certificates by which the servers of the log, and whoever connects to them, know one another.

Both ends of a connection show one, and both look at the other's: so a certificate is for servers and clients alike
(its extended key usage, if it has one, says both), and names the host at which its node is reached. The authority is of
the log's servers alone: whoever has a certificate of it may be one.

What is wrong with a node's own certificate is found before anything is started, by a handshake with itself.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from kivi.errors import InvalidArgument

__all__ = ["Certificates", "trusting"]


def trusting(ca: str, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """For a client of servers with certificates of the authority ``ca``, which shows them its own if it has one.

    Raises InvalidArgument for files that cannot be read, or are not what they should be.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key)


def _context(purpose: ssl._SSLMethod, ca: str, cert: str | None, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(f"the authority of the log's servers in {ca} cannot be used: {error}") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument(f"the certificate {cert} with the key {key} cannot be used: {error}") from None
    return context


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM: the chain ``cert`` of a node that is reached at ``host``, its ``key``, and the authority ``ca``."""

    ca: str
    cert: str
    key: str
    host: str

    def client(self) -> dict[str, Any]:
        """What ``Nats`` takes for a connection to this node's own server, whatever its address. Raises
        InvalidArgument."""
        return {"tls": trusting(self.ca, self.cert, self.key), "tls_hostname": self.host}

    def check(self) -> None:
        """That others would take it, as a server and as a client. Raises InvalidArgument."""
        ends = [ssl.MemoryBIO(), ssl.MemoryBIO()]
        server = _context(ssl.PROTOCOL_TLS_SERVER, self.ca, self.cert, self.key)
        client = trusting(self.ca, self.cert, self.key)
        talks = [
            server.wrap_bio(ends[0], ends[1], server_side=True),
            client.wrap_bio(ends[1], ends[0], server_hostname=self.host),
        ]
        for _ in range(4):  # a handshake takes two flights of each
            for talk in reversed(talks):
                try:
                    talk.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as error:
                    why = getattr(error, "verify_message", "") or error.reason or str(error)
                    raise InvalidArgument(
                        f"the certificate {self.cert} is none that the log's servers take from {self.host}: {why}; "
                        f"it has to be of the authority in {self.ca}, to name that host, and be for servers and clients"
                    ) from None
