"""Features: what frames may have that some versions of kivi cannot read, or apply otherwise, and from which place in
the log on they may.

::

    off     some live node cannot read it or applies it otherwise, or nobody has needed it yet
    on      from an entry of the log on, for good: every live node could when it came

A node says in its heartbeats what it can (``features``), and whoever needs a feature first has it switched on by an
entry. Which are on is a function of the log's prefix (``kivi.log.members``), so all nodes agree at every place. What
has to hold, so that nodes of several versions may run side by side, and a node may go back to an older one:

* **What is applied otherwise is a feature, too.** Where a version changes what an entry does that older ones can read,
  nodes of both would come to have different content (C1), and no error would say so.
* **Nothing of a feature is written that is off.** An entry says which it ``needs``, and ``ReplicatedLog.propose``
  refuses it. A feature that is on stays on, so an entry never comes before the one that switches it on.
* **It is switched on only if every live node can.** ``Members.lacking`` is asked where the entry is judged, not only
  where it is written; a node that has been silent for a day is not waited for.
* **Who cannot read it stops, and says so.** The entry is one that no version takes for another: one from before
  features says that it cannot be read, with the sentence that is in it, and later ones name the feature
  (``ReplicatedLog`` looks before it applies a frame). So nobody passes over what he does not know.
* **Nobody goes on behind that place who cannot.** The marker of a node's directory, and of copies of it, names what was
  on there before the place is saved (``kivi.store.opening``); and what a node says of itself that lacks a feature which
  is on is void.

To add a feature: a line below, ``needs`` in the entries that have it. Everything else is here already.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Final

from kivi.errors import FeatureOff, FormatTooNew
from kivi.log import Entry, Kind

__all__ = [
    "FEATURES",
    "LATE_STAGES",
    "MATCHES_RAISED",
    "MOVES",
    "NO_SHARDS",
    "WEIGHTED_QUANTILES",
    "check_features",
    "feature_off",
    "on_entry",
]

LATE_STAGES: Final = "late_stages"
"""Versions from before features kept what a commit left out, where they had not made that commit themselves."""
MATCHES_RAISED: Final = "matches_raised"
MOVES: Final = "moves"
NO_SHARDS: Final = "no_shards"
WEIGHTED_QUANTILES: Final = "weighted_quantiles"
FEATURES: Final = {
    LATE_STAGES: "staged events that come late are left out",
    MATCHES_RAISED: "rules whose judgement is a pattern",
    MOVES: "shards move between nodes that run",
    NO_SHARDS: "nodes that hold no shards",
    WEIGHTED_QUANTILES: "aggregates with the measure weighted_quantiles",
}
"""Those of this version, and what they are for. Names are permanent."""


def check_features(what: str, features: Iterable[str], known: Collection[str] = FEATURES) -> None:
    """Raises FormatTooNew for ``what`` has features that are not known here."""
    if unknown := sorted(set(features) - set(known)):
        raise FormatTooNew(
            f"{what} has the feature {', '.join(unknown)}, which this version of kivi does not know: use a newer one"
        )


def feature_off(feature: str, nodes: Iterable[str]) -> FeatureOff:
    named = list(nodes)
    who = f"the node {', '.join(named)} is" if len(named) == 1 else f"the nodes {', '.join(named)} are"
    why = f"{who} of a version that does not know it: upgrade first" if named else "it was not switched on: ask again"
    return FeatureOff(f"the feature {feature} is off in this cluster; {why}", feature=feature, nodes=named)


def on_entry(feature: str) -> Entry:
    """That switches a feature on, if every live node can. In the form of what a node says of itself, with a state that
    there is not: so versions from before features name it where they stop."""
    told = f"from here on the cluster uses the feature {feature}: upgrade this node"
    return Entry(Kind.MEMBER, (json.dumps([0, told, 0, {"on": feature}]).encode(),), 0)
