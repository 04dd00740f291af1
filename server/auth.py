"""Access tokens: who may call, and what.

The token file has one token a line, optionally followed by what it may do: ``read``, ``write`` (and
read) or ``admin`` (everything; the default). Empty lines and lines that begin with ``#`` are skipped.
Tokens are compared in constant time, all of them each time, so that timing tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

from kivi.errors import InvalidArgument, PermissionDenied, Unauthenticated

__all__ = ["Access", "Tokens"]


class Access(IntEnum):
    """Each includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


class Tokens:
    """The tokens a server knows; none at all means that everyone may do everything."""

    def __init__(self, lines: Iterable[str] | None = None) -> None:
        self._known: list[tuple[bytes, Access]] = []
        self._open = lines is None
        for number, line in enumerate(lines or (), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or (len(words) == 2 and words[1].upper() not in Access.__members__):
                raise InvalidArgument(f"token file, line {number}: write a token and then read, write or admin")
            access = Access[words[1].upper()] if len(words) == 2 else Access.ADMIN
            self._known.append((_digest(words[0]), access))
        if lines is not None and not self._known:
            raise InvalidArgument("the token file has no token: nobody could connect")

    @staticmethod
    def load(path: str | None) -> Tokens:
        if path is None:
            return Tokens()
        try:
            return Tokens(Path(path).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"cannot read the token file {path}: {error}") from None

    def access(self, metadata: Iterable[tuple[str, str | bytes]]) -> Access:
        """What the caller may do. Raises Unauthenticated."""
        if self._open:
            return Access.ADMIN
        value = next((value for name, value in metadata if name == "authorization"), "")
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("this server asks for an access token: connect(access_token=...) or KIVI_TOKEN")
        sent, found = _digest(token.strip()), None
        for known, access in self._known:
            if hmac.compare_digest(known, sent):
                found = access
        if found is None:
            raise Unauthenticated("the server does not know this access token")
        return found


def _digest(token: str) -> bytes:
    """Equal lengths, so that comparing says nothing about a token's length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def require(have: Access, need: Access, what: str) -> None:
    if have < need:
        raise PermissionDenied(
            f"this access token may {have.name.lower()}; {what} needs {need.name.lower()}", needs=need.name.lower()
        )
