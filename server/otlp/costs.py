"""What calls to language models cost: prices that somebody keeps, and a rule that joins each call with them.

Beside ``llm_calls``, by the first such call::

    llm_prices     (provider, model)  input_price, output_price: dollars a token; nobody but you writes them
    llm_costs      an event for each call whose model has a price, in the call's own commit
    llm_costs_5m   (tenant, service, provider, model, slot)  cost, calls

The rule, ``llm_costs``, judges a call by the prices as they are when it is committed. One whose model has none costs
nothing yet: ``db.rules()`` counts it as ``missing``. Neither does one with tokens whose price is null, and is in no
sum; a model that only reads, for embeddings, needs no ``output_price``. Numbers are decimals, so sums are exact.
"""

from __future__ import annotations

import logging
from typing import Final

from kivi_server.otlp.making import made

from kivi.errors import AlreadyExists, InvalidArgument
from kivi.model import surface
from kivi.model.declarations import TimeSlot, aggregate_schema, event_table_schema, row_table_schema, time_slot
from kivi.model.expressions import Expr, Value, coalesce, col
from kivi.model.roles import COSTS, with_role
from kivi.model.rules import lookup, named, ref
from kivi.model.schema import TableSchema
from kivi.store.facade import Store

__all__ = ["declare"]

_log = logging.getLogger("kivi.server")
_MONEY: Final = "decimal(18,10)"
"""As prices are told for a million tokens, with up to four digits behind the point."""
_PRICES: Final = "llm_prices"
_MODEL: Final = {"provider": "string", "model": "string"}
_GROUPS: Final = ("tenant", "service", "provider", "model")


def _paid(tokens: str, price: str) -> tuple[Expr, Value]:
    """Whether it is known what some tokens cost, and how much."""
    return (col(tokens) == 0) | ~ref(price).is_null(), coalesce(col(tokens) * ref(price), 0)


_IN, _OUT = _paid("input_tokens", "input_price"), _paid("output_tokens", "output_price")
_IS_KNOWN: Final = _IN[0] & _OUT[0]
_COST: Final = _IN[1] + _OUT[1]


def declare(store: Store, calls: TableSchema, is_fresh: bool) -> None:
    """What is missing of it. ``is_fresh``: there are no calls yet.

    Where there are calls, and prices, somebody has dropped what is missing, and it stays away; where there are no
    prices, an older server has taken the calls. What cannot be, as a table of that name has other columns, is told by
    the log alone: the calls are counted all the same.
    """
    if not is_fresh and any(table.name == _PRICES for table in store.tables()):
        return
    costs = {
        "namespace": "string", "service": "string", "tenant": "string", **_MODEL,
        "cost": _MONEY, "ts": "timestamp", "trace_id": "bytes", "span_id": "bytes",
    }  # fmt: skip
    try:
        events = made(store, event_table_schema("llm_costs", "ts", costs, calls.retention_us))
        groups: list[str | TimeSlot] = [*_GROUPS, time_slot("ts", "5m")]
        sums = aggregate_schema("llm_costs_5m", events, groups, {"cost": surface.sum("cost"), "calls": surface.count()})
        made(store, with_role(sums, COSTS))
        made(store, row_table_schema(_PRICES, _MODEL, {"input_price": _MONEY, "output_price": _MONEY}))
        against = lookup(_PRICES, by=list(_MODEL))
        store.create_rule(named("llm_costs", calls.name, against, _IS_KNOWN, "llm_costs", {"cost": _COST}, False))
    except AlreadyExists:
        pass  # the rule: another node, or client, was quicker
    except InvalidArgument as error:  # what may be in a moment is tried again, with the calls
        _log.error("calls to language models have no costs: %s", error.message)
