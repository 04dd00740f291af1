"""The calls about rules (R25). A token may declare, see and drop those whose tables are all its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kivi_server.auth import Access

from kivi.model.rules import Rule
from kivi.wire.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from kivi_server.auth import Grant
    from kivi_server.sessions import Sessions

    from kivi.store.facade import Store

__all__ = ["RuleCalls"]


class RuleCalls:
    """Of a service; each runs in a thread."""

    store: Store
    sessions: Sessions

    def CreateRule(self, request: pb.CreateRuleRequest, grant: Grant) -> None:
        rule = Rule.from_json(request.definition)
        grant.require(Access.ADMIN, "CreateRule", *rule.tables)
        self.sessions.alerts.create_rule(rule, backfill=request.backfill)

    def ListRules(self, _: pb.ListRulesRequest, grant: Grant) -> pb.ListRulesResponse:
        found = [(rule, listed) for rule, listed in self.store.rules() if all(map(grant.allows, rule.tables))]
        return pb.ListRulesResponse(rules=[json.dumps(listed) for _, listed in found])

    def DropRule(self, request: pb.DropRuleRequest, grant: Grant) -> None:
        for rule, _ in self.store.rules():
            if rule.name == request.name:
                grant.require(Access.ADMIN, "DropRule", *rule.tables)
        self.store.drop_rule(request.name)
