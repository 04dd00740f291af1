"""Messages between a server and the process of a question, over a pair of sockets: a kind, a length, the bytes.

========== ================== ============================================== =======================
kind       from               payload                                        answered by
========== ================== ============================================== =======================
QUESTION   the server         text and limits, as JSON                       RESULT..., END or ERROR
PARAMETERS the server, before an Arrow IPC stream of one row; empty: none
TABLE      the process        a name                                         VALUE: kivi.v1.Table; empty: none
TABLES     the process        empty                                          VALUE: the names of all, as JSON
FILES      the process        the name of an event table, as it was told     VALUE: kivi.model.event_files
SCAN       the process        kivi.v1.ScanSpec; of a table whose FILES were  VALUE: the scan's number
                              asked for: what these do not have
NEXT       the process        the scan's number                              VALUE: an Arrow IPC stream; empty: it ended
RESULT     the process        an Arrow IPC stream: some rows of the answer
END        the process        empty: it has started, or the answer has ended
ERROR      both               kivi.v1.Error
========== ================== ============================================== =======================
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Any, Final

__all__ = ["Gone", "Kind", "receive", "send"]

_HEAD: Final = struct.Struct("<BI")
_MOST: Final = 1 << 30


class Gone(Exception):
    """Nobody is at the other end any more, or somebody who does not speak like this."""


class Kind(IntEnum):
    QUESTION = 1
    PARAMETERS = 2
    TABLE = 3
    SCAN = 4
    NEXT = 5
    VALUE = 6
    RESULT = 7
    END = 8
    ERROR = 9
    FILES = 10
    TABLES = 11


def send(channel: socket.socket, kind: Kind, payload: Any = b"") -> None:
    """Raises Gone."""
    view = memoryview(payload)
    try:
        channel.sendall(_HEAD.pack(kind, view.nbytes))
        if view.nbytes:
            channel.sendall(view)
    except OSError:
        raise Gone from None


def receive(channel: socket.socket) -> tuple[Kind, bytes]:
    """The next message. Raises Gone."""
    try:
        kind, size = _HEAD.unpack(_exactly(channel, _HEAD.size))
        if size > _MOST:
            raise Gone
        return Kind(kind), bytes(_exactly(channel, size))
    except (OSError, ValueError):
        raise Gone from None


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        read = channel.recv_into(view[at:])
        if not read:
            raise Gone
        at += read
    return data
