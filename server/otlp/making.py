"""Tables that are made as they are needed, by whoever needs them first: another node, an intake, a client."""

from __future__ import annotations

from kivi.errors import AlreadyExists, NotFound, Unavailable
from kivi.model.schema import TableSchema
from kivi.store.facade import Store

__all__ = ["made"]


def made(store: Store, schema: TableSchema) -> TableSchema:
    """The table, or one of its name that is there. Raises Unavailable while somebody else makes it, and what
    ``Store.create`` raises of what cannot be."""
    try:
        return store.create(schema)
    except AlreadyExists:
        pass
    try:
        return store.table(schema.name)
    except NotFound:
        raise Unavailable(f"table {schema.name!r} is being made by somebody else: try again in a moment") from None
