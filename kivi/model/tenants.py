"""Tenants: a reader and writer of some rows, those with one value in one column, and of nothing else.

**The invariant.** What a tenant is answered is what a store would answer that holds its rows alone, commit timestamps
and the time that answers take apart.

It is enforced at the snapshot, not at the calls: a lease has its tenant from the moment it is opened, and whatever is
asked of a lease passes one of these:

    definitions   ``Store.table``: a table that does not keep tenants apart is none, whether it is there or not
    reads         ``narrowed``, in ``Store.scan`` and ``Store.answer``, and before a subscription's query is bound
    rows by key   ``is_key``: the key of another's row has no row
    writes        ``check_key``, and ``kivi.store.checks.check_tenant`` of whole batches, in ``Txn``

What a call says of the store without a snapshot (statistics, rules, alerts, metrics) is for no tenant: the server has
lists of what is (``kivi_server.auth``).

**Which tables keep tenants apart.** Events are one by one, so an event table that has the column does. Rows are found,
and collide, by their key, so row tables and views have to have it there; and an aggregate, where it groups by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from kivi.errors import InvalidArgument, PermissionDenied
from kivi.model.expressions import Expr, asks_hierarchy
from kivi.model.names import is_name
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema

__all__ = ["Tenant"]

_ISSUED: Final = re.compile(r"k1-[0-9]{16}-[0-9a-f]{24}\Z")
_INT64: Final = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Those rows whose ``column`` is ``text``: a string, or a whole number in decimal digits."""

    column: str
    text: str

    @staticmethod
    def parse(text: str) -> Tenant:
        """Of ``column:value``. Raises ValueError."""
        column, colon, value = text.partition(":")
        if not colon or not value or not is_name(column):
            raise ValueError("rows are named by a column and its value, like customer:acme")
        return Tenant(column, value)

    def __str__(self) -> str:
        return f"{self.column}:{self.text}"

    # -- tables ---------------------------------------------------------------------------------

    def sees(self, schema: TableSchema) -> bool:
        """Whether the table keeps tenants apart by the column."""
        return schema.remembered(self, lambda: self._sees(schema))

    def _sees(self, schema: TableSchema) -> bool:
        column = schema.by_name.get(self.column)
        if column is None or not self._fits(str(column.type)):
            return False
        match schema.kind:
            case "event":
                return True
            case "aggregate":
                groups = [group for group in schema.group_by if group.name == self.column]
                return any(group.slot is None and group.source == self.column for group in groups)
        return self.column in schema.key_names

    def _fits(self, type_name: str) -> bool:
        if type_name == "int64":
            digits = self.text.removeprefix("-")
            return digits.isascii() and digits.isdigit() and len(digits) < 20 and int(self.text) in _INT64
        return type_name == "string"

    def refusal(self, table: str) -> PermissionDenied:
        """The same whether there is such a table or not."""
        return PermissionDenied(
            f"this access token is for rows with {self.column} = {self.text!r}, and {table!r} is no table that keeps "
            "these apart: an event table with this column, an aggregate by it, or rows with it in their key",
            table=table,
        )

    def check(self, schema: TableSchema) -> None:
        """Raises PermissionDenied."""
        if not self.sees(schema):
            raise self.refusal(schema.name)

    def value(self, schema: TableSchema) -> Any:
        """In stored form. Raises PermissionDenied."""
        self.check(schema)
        return int(self.text) if str(schema.by_name[self.column].type) == "int64" else self.text

    # -- reads ----------------------------------------------------------------------------------

    def narrowed(self, schema: TableSchema, wanted: Scan) -> Scan:
        """What is asked for, of these rows. Raises PermissionDenied, InvalidArgument."""
        own = Expr("==", self.column, self.value(schema))
        if wanted.where is not None and asks_hierarchy(wanted.where):
            raise PermissionDenied("hierarchies are no tenant's own: this access token may not ask for under or covers")
        changes = wanted.changes
        if changes is not None and (changes.skip or changes.take is not None):
            raise InvalidArgument("skip and take count the events of all: this access token reads changes without them")
        return replace(wanted, where=own if wanted.where is None else own & wanted.where, stored_bytes=0)

    def is_key(self, schema: TableSchema, key: tuple[Any, ...]) -> bool:
        """Whether a row key, in stored form, is of these rows. Raises PermissionDenied."""
        value = self.value(schema)
        return bool(key[schema.key_names.index(self.column)] == value)

    # -- writes ---------------------------------------------------------------------------------

    def check_key(self, schema: TableSchema, key: tuple[Any, ...]) -> None:
        """Raises PermissionDenied."""
        if not self.is_key(schema, key):
            raise self.foreign(schema)

    def foreign(self, schema: TableSchema) -> PermissionDenied:
        return PermissionDenied(
            f"this access token writes rows with {self.column} = {self.text!r} alone, and one for {schema.name!r} has "
            "another value there, or none",
            table=schema.name,
        )

    def check_views(self, schema: TableSchema, views: tuple[TableSchema, ...]) -> None:
        """A view in which its rows would collide with those of others says which there are. Raises PermissionDenied."""
        for view in views:
            if view.unique and self.column not in view.key_names:
                raise PermissionDenied(
                    f"rows of {schema.name!r} are unique among those of all tenants in a view of it: this access token "
                    f"may not write there; a view whose key has {self.column!r} keeps them apart",
                    table=schema.name,
                )

    def own_token(self, token: str) -> str:
        """A request token as it is kept: one that a caller makes up is no other tenant's. Those that the library makes
        are random, and go by their time of issue."""
        text = self.text.replace("%", "%25").replace("/", "%2F")  # a's "b/x" is not the "x" of a/b
        prefix = f"{self.column}:{text}/"
        return token if not token or _ISSUED.match(token) or token.startswith(prefix) else prefix + token
