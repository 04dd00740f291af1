"""Who may do that: the same tokens, roles and allowances as over gRPC, and whether this listener takes writes."""

from __future__ import annotations

from typing import Any, Final

from kivi_server.auth import FOR_TENANTS, Access, Grant, Tokens
from kivi_server.clients import Client
from kivi_server.http.front import CALL
from kivi_server.requests import stopping
from kivi_server.sessions import Sessions
from starlette.requests import Request

from kivi.errors import PermissionDenied

__all__ = ["Door", "client_of"]

CLIENT: Final = "kivi.client"
"""Who asks, in a request's scope."""


def client_of(request: Request) -> Client:
    """Of a request that has entered."""
    client: Client = request.scope[CLIENT]
    return client


class Door:
    """``takes_writes``: the listener is on loopback, or there are tokens."""

    def __init__(self, sessions: Sessions, tokens: Tokens, *, takes_writes: bool) -> None:
        self.sessions, self.store, self.tokens = sessions, sessions.store, tokens
        self.takes_writes = takes_writes

    def enter(self, request: Request, need: Access, what: str, *tables: str) -> Grant:
        """Raises Unauthenticated, PermissionDenied, ResourceExhausted, Unavailable while the server stops."""
        self.tokens.refresh()
        grant = self.tokens.of_header(request.headers.get("authorization", ""))
        client = request.scope[CLIENT] = self.sessions.clients.of(grant, _peer(request.scope))
        client.take(1)
        if need is Access.READ:  # before it waits for an answer that others wait for, too
            client.check_reads()
        if need > Access.READ and not self.takes_writes:
            raise PermissionDenied(
                "this listener is not on loopback and the server has no token file, so it takes no writes over HTTP: "
                "start it with --token-file, or with --http on localhost"
            )
        if request.scope[CALL].partition("/")[0] not in FOR_TENANTS:
            grant.require_all_rows(what)
        self.require(grant, need, what, *tables)
        if self.sessions.stopping:
            raise stopping()
        return grant

    def require(self, grant: Grant, need: Access, what: str, *tables: str) -> None:
        """Raises PermissionDenied."""
        grant.require(need, what, *tables)
        for table in tables if grant.tenant is not None else ():
            self.store.table(table, tenant=grant.tenant)


def _peer(scope: Any) -> str:
    """Without tokens a client is a machine: connections of HTTP come and go."""
    return str((scope.get("client") or ("",))[0])
