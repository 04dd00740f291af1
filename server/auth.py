"""Access tokens: who may call, what, on which tables, and how much.

The token file has one token a line, with its role, the tables it is for, and limits of its own::

    # token             role     tables, commas between patterns    limits
    7f3a9c0e...         admin
    b81d44aa...         writer   tables=invocations,anomalies       rate=500 staged=1GiB
    c2e09b71...         reader   tables=endpoint_*,server_*         snapshots=20
    a81f4e07...         writer   rows=customer:acme                 events=1000/s query=0.2/s

``rows`` binds a token to the rows with one value in one column (``kivi.model.tenants``): it sees and writes these, in
tables that keep them apart by that column, and may make none of the calls that concern others (``FOR_TENANTS``).

A role includes those before it: ``reader``, ``writer``, ``admin`` (``read`` and ``write`` are understood; a token alone
is an admin's). Without ``tables`` it is for all of them; with it, calls that concern the whole store (checkpoint,
consolidate) are not for it. Whoever may append to a table thereby changes its aggregates, which follow by themselves.
``snapshots`` counts those that are open at a time: ``db.get`` keeps none; ``subscriptions`` likewise. ``events=1000/s``
(or ``/m``, ``/h``, ``/d``), ``bytes=1MiB/s`` and ``query=0.2/s``, in seconds, are quotas (``kivi_server.quotas``).

The file is read again when it has changed. One with a fault is not taken, and what was known before stays. Tokens are
compared in constant time, all of them each time, so that timing tells nothing; they are kept as digests, and neither
they nor the file's lines are ever logged or part of an error. What tells one from another in the log is the
beginning of its digest, which says nothing of a token that is random: make them so (``openssl rand -hex 16``).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from kivi_server.options import size_of
from kivi_server.quotas import Quota

from kivi.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kivi.model.schema import TableSchema
from kivi.model.tenants import Tenant

__all__ = ["FOR_TENANTS", "Access", "Allowance", "Grant", "Tokens"]

_log = logging.getLogger("kivi.server")
_LOOK_S: Final = 1.0  # how often the file is looked at


class Access(IntEnum):
    """Each includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


_ROLES: Final = {
    "read": Access.READ,
    "reader": Access.READ,
    "write": Access.WRITE,
    "writer": Access.WRITE,
    "admin": Access.ADMIN,
}


FOR_TENANTS: Final = frozenset(
    {
        # Of the service. A session's requests have the tenant in their snapshot, or in ``Requests`` what is refused.
        "Exchange", "Subscribe", "ListTables", "Describe", "Watermark", "Stage", "DiscardStages",
        # Over HTTP: the names of routes.
        "tables", "describe", "rows", "table_rows", "query", "sql", "live", "append", "transaction", "prometheus",
    }
)  # fmt: skip
"""The calls that a token with ``rows`` may make; each passes the tenant on. Whatever is not here is refused."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much one client may ask for; None: no limit of its own.

    ``rate``: requests a second, of which a second's worth may come at once. ``snapshots``: open at a time. ``staged``:
    bytes staged and not committed. ``subscriptions``: there at a time. ``events``: that are appended, and rows that
    are written. ``nbytes``: of these. ``query``: seconds that reads and questions take.
    """

    rate: float | None = None
    snapshots: int | None = None
    staged: int | None = None
    subscriptions: int | None = None
    events: Quota | None = None
    nbytes: Quota | None = None
    query: Quota | None = None

    @property
    def meters_writes(self) -> bool:
        return self.events is not None or self.nbytes is not None

    def or_else(self, other: Allowance) -> Allowance:
        """This, and ``other`` for what it leaves open."""
        return Allowance(
            *(getattr(other if getattr(self, each.name) is None else self, each.name) for each in fields(Allowance))
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token may do. ``name`` tells it from others; empty where there are no tokens."""

    access: Access = Access.ADMIN
    tables: tuple[str, ...] = ()
    allowance: Allowance = Allowance()
    name: str = ""
    tenant: Tenant | None = None
    """Whose rows alone it sees and writes; None: all."""

    @property
    def view(self) -> str:
        """Which tables and rows it is for, as a short text; empty for all of them. Whatever name a token has, those of
        one view see the same."""
        if not self.tables and self.tenant is None:
            return ""
        return hashlib.sha256(repr((self.tables, self.tenant)).encode()).hexdigest()[:12]

    def allows(self, table: str) -> bool:
        """Whether it is for a table of this name."""
        return not self.tables or _matches(self.tables, table)

    def sees(self, schema: TableSchema) -> bool:
        """Whether it is for a table, and that table has rows for it."""
        return self.allows(schema.name) and (self.tenant is None or self.tenant.sees(schema))

    def require(self, need: Access, what: str, *tables: str) -> None:
        """Raises PermissionDenied. Whether a table is there is not told to those who may not see it."""
        if self.access < need:
            raise PermissionDenied(
                f"this access token may {self.access.name.lower()}; {what} needs {need.name.lower()}",
                needs=need.name.lower(),
            )
        for table in tables:
            if not self.allows(table):
                raise PermissionDenied(f"this access token is not for table {table!r}", table=table)

    def require_everything(self, what: str) -> None:
        """For what concerns the whole store. Raises PermissionDenied."""
        self.require_all_rows(what)
        if self.tables:
            raise PermissionDenied(f"this access token is for some tables only; {what} concerns all of them")

    def require_all_rows(self, what: str) -> None:
        """For what tells of, or does something to, the rows of others. Raises PermissionDenied."""
        if self.tenant is not None:
            raise PermissionDenied(
                f"this access token is for rows with {self.tenant.column} = {self.tenant.text!r} only; {what} concerns "
                "those of others, too: use one without rows="
            )


@lru_cache(maxsize=4_096)
def _matches(patterns: tuple[str, ...], table: str) -> bool:
    return any(fnmatchcase(table, pattern) for pattern in patterns)


class Tokens:
    """The tokens a server knows; none at all means that everyone may do everything. Thread safe."""

    def __init__(self, lines: Iterable[str] | None = None) -> None:
        self._path: str | None = None
        self._stamp: tuple[int, ...] = ()
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self.generation = 0
        self._known: list[tuple[bytes, Grant]] | None = None if lines is None else _parsed(lines)

    @property
    def asked_for(self) -> bool:
        """Whether callers have to have one."""
        return self._known is not None

    @staticmethod
    def load(path: str | None) -> Tokens:
        """Raises InvalidArgument for a file that cannot be read or has a fault; of a line only its number is told."""
        if path is None:
            return Tokens()
        stamp = _stamp(path)
        tokens = Tokens(_lines(path))
        tokens._path, tokens._stamp = path, stamp
        return tokens

    def refresh(self) -> None:
        """Looks at the file, at most once a second, and reads it if it has changed: ``generation`` is another then."""
        if self._path is None or time.monotonic() - self._looked < _LOOK_S:
            return
        with self._lock:
            self._looked = time.monotonic()
            try:
                stamp = _stamp(self._path)
                if stamp == self._stamp:
                    return
                self._known = _parsed(_lines(self._path))
                self._stamp = stamp
            except InvalidArgument as error:
                _log.error("the tokens stay as they were: %s", error.message)
                return
            self.generation += 1
        _log.info("the token file was read again: %d tokens", len(self._known))

    def grant(self, metadata: Iterable[tuple[str, str | bytes]]) -> Grant:
        """What the caller may do. Raises Unauthenticated."""
        self.refresh()
        value = next((value for name, value in metadata if name == "authorization"), "")
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return self.of_header(text)

    def of_header(self, text: str) -> Grant:
        """Of an authorization header. Raises Unauthenticated."""
        known = self._known
        if known is None:
            return Grant()
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("this server asks for an access token: connect(access_token=...) or KIVI_TOKEN")
        sent, found = _digest(token.strip()), None
        for digest, grant in known:
            if hmac.compare_digest(digest, sent):
                found = grant
        if found is None:
            raise Unauthenticated("the server does not know this access token")
        return found

    def now(self, grant: Grant) -> Grant | None:
        """What the token of ``grant`` may do by now; None if it is not known any more."""
        known = self._known
        if known is None:
            return grant
        return next((each for _, each in known if each.name == grant.name), None)


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InvalidArgument(f"cannot read the token file {path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError as error:
        raise InvalidArgument(f"cannot read the token file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"the token file {path} is not UTF-8 text") from None


def _parsed(lines: Iterable[str]) -> list[tuple[bytes, Grant]]:
    known: dict[bytes, Grant] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest = _digest(words[0])
        if digest in known:
            raise InvalidArgument(f"token file, line {number}: this token has a line already")
        known[digest] = _granted(words[1:], digest.hex()[:12], f"token file, line {number}")
    if not known:
        raise InvalidArgument("the token file has no token: nobody could connect")
    return list(known.items())


def _granted(words: list[str], name: str, where: str) -> Grant:
    access = Access.ADMIN
    if words and "=" not in words[0]:
        role = words.pop(0).lower()
        if role not in _ROLES:
            raise InvalidArgument(f"{where}: after the token comes reader, writer or admin")
        access = _ROLES[role]
    tables: tuple[str, ...] = ()
    rate, snapshots, staged, tenant = None, None, None, None
    subscriptions, events, nbytes, query = None, None, None, None
    given = set[str]()
    for word in words:
        key, _, text = word.partition("=")
        if key in given:  # which of the two was meant nobody can tell, and one may be the wider
            raise InvalidArgument(f"{where}: {key}= is there twice")
        given.add(key)
        try:
            match key:
                case "tables":
                    tables = tuple(filter(None, text.split(",")))
                    if not tables:
                        raise ValueError
                case "rate":
                    rate = _positive(float(text))
                case "snapshots":
                    snapshots = int(_positive(int(text)))
                case "staged":
                    staged = int(_positive(size_of(text)))
                case "rows":
                    tenant = Tenant.parse(text)
                case "subscriptions":
                    subscriptions = int(_positive(int(text)))
                case "events":
                    events = Quota.parse(text, float)
                case "bytes":
                    nbytes = Quota.parse(text, size_of)
                case "query":
                    query = Quota.parse(text, float)
                case _:
                    raise InvalidArgument(
                        f"{where}: there is tables=, rows=, rate=, snapshots=, staged=, subscriptions=, events=, "
                        "bytes= and query="
                    )
        except ValueError:
            raise InvalidArgument(f"{where}: what follows {key}= is not right") from None
    if tenant is not None and access is Access.ADMIN:
        raise InvalidArgument(f"{where}: rows= is of readers and writers; what an admin does concerns all rows")
    allowance = Allowance(rate, snapshots, staged, subscriptions, events, nbytes, query)
    return Grant(access, tables, allowance, name, tenant)


def _positive(number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _digest(token: str) -> bytes:
    """Equal lengths, so that comparing says nothing about a token's length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
