"""The calls about rules, as steps: see ``kivi.client.steps``."""

from __future__ import annotations

import json
from typing import Any

from kivi.api.rules import RuleArguments, rule_name
from kivi.client.core import Core
from kivi.client.steps import Steps, Unary
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["create_rule", "drop_rule", "rules"]


def create_rule(core: Core, wanted: RuleArguments) -> Steps[None]:
    """The server checks names and types against the tables."""
    request = pb.CreateRuleRequest(definition=wanted.rule.to_json(), backfill=bool(wanted.backfill))
    yield Unary("CreateRule", request, None if wanted.backfill else core.timeout_s)


def rules(core: Core) -> Steps[list[dict[str, Any]]]:
    reply = yield from core.call("ListRules", pb.ListRulesRequest())
    return [json.loads(text) for text in reply.rules]


def drop_rule(core: Core, name: str) -> Steps[None]:
    yield from core.call("DropRule", pb.DropRuleRequest(name=rule_name(name)))
