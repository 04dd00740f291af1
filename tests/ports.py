"""Ports for servers of the tests, chosen before the server is there, or kept while it is away.

The system gives whoever asks for any port one of some seven thousand, and all tests together ask thousands of times: a
port that was merely free when it was chosen is now and then another's when its server comes to bind it.
"""

from __future__ import annotations

import os
import socket

__all__ = ["Port"]


class Port:
    """One of this machine's, by its ``number``, that is kept for as long as this object is there.

    A socket that does not listen is bound to it, at all addresses. So the system gives it to nobody who asks for any,
    and to no connection; a server that is told its number listens there, as servers set SO_REUSEADDR.
    """

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as held:
            if dual:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            self.number: int = held.getsockname()[1]
            self._held = held.detach()

    def __del__(self) -> None:
        os.close(self._held)
