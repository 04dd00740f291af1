"""The methods of a database that are about rules (R25), and their arguments."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from kivi.api.arguments import takes
from kivi.errors import InvalidArgument
from kivi.model.expressions import Expr
from kivi.model.patterns import Pattern
from kivi.model.rules import Against, Rule, named
from kivi.model.types import shown

__all__ = ["RuleArguments", "RuleMethods", "rule_name"]


@dataclass(slots=True)
class RuleArguments:
    """Of ``create_rule``. The tables have the last word: ``kivi.model.rules.declared_rule``."""

    name: str
    _: KW_ONLY
    source: str
    into: str
    against: Against | Mapping[str, Against] | None = None
    where: Expr | None = None
    select: Mapping[str, object] | None = None
    own_events: bool = False
    backfill: bool = False
    match: Pattern | None = None
    lateness: str | int | dt.timedelta | None = None

    @property
    def rule(self) -> Rule:
        """Raises InvalidArgument, SchemaError."""
        return named(
            self.name, self.source, self.against, self.where, self.into, self.select, self.own_events,
            self.match, self.lateness,
        )  # fmt: skip


def rule_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"a rule's name is a string, not {shown(name)}")
    return name


class RuleMethods(ABC):
    """Wherever the store is."""

    @abstractmethod
    @takes(RuleArguments)
    def create_rule(self, wanted: RuleArguments) -> None:
        """A rule: events of ``source`` for which ``where`` is true raise events of ``into``, in their own commit.

        ``against``: the rows that they are measured against, ``kivi.previous_slot`` or ``kivi.lookup``, or a dict of
        names for several: ``kivi.ref("column")``, or ``kivi.ref("name.column")``, stands for a column of that row in
        ``where`` and ``select``. It is the row as it was when the event's commit was made: at its ``rule_ts``, the
        newest snapshot then. With ``own_events`` the commit's own events are added to slots. ``select``: columns of
        ``into`` and expressions for them; columns that both tables have, with the same type, are taken over besides.

        It judges what is committed from now on, whoever appends it; a reader sees an event and what it raised, or
        neither. An event without a row to be measured against raises nothing, and neither does one for which an
        expression leaves its range: ``rules`` counts them, and no append fails. What was raised stays when events are
        retracted. Rules may raise events that other rules judge, but not in a circle.

        ``backfill``: what was committed before is judged as well, against rows as they are now; what that raises is
        there when this returns, in one commit. If it is stopped meanwhile, the same call again finishes it: ``rules``
        tells whether a rule is ``backfilled``.

        ``match``, a ``kivi.pattern`` with a ``within``, in place of ``against``: what it raises are the matches of that
        pattern over the events for which ``where`` is true, each once, soon after event time has passed all that could
        change it by ``lateness`` ("5s" unless it is given; "auto": what 0.999 of the events kept to). ``kivi.col`` in
        ``select`` is a column of a match then, and the event time is that of its last event, if nothing else is said. A
        thread of the store does it, or of one node of a cluster, and no commit waits for it; with ``backfill`` it
        begins with all events that there are. An event that is later than ``lateness`` raises nothing again: ``rules``
        counts the matches that such events changed (``late``), and tells up to which event time matches were judged
        (``judged_us``) and why they cannot be now (``error``).

        The tables that it names cannot be dropped before it. Raises AlreadyExists, NotFound, SchemaError.
        """

    @abstractmethod
    def rules(self) -> list[dict[str, Any]]:
        """The rules, by name: what they were created with, as text, and how many events each has ``judged`` and
        ``raised``; of the others those that had no row to be measured against (``missing``), for which something could
        not be told (``failed``), or that are too old for ``into`` (``late``)."""

    @abstractmethod
    def drop_rule(self, name: str) -> None:
        """Drops a rule; what it raised stays. Raises NotFound."""
