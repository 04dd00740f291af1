"""Simulated clusters whose nodes are of several versions: one knows features that another one does not.

A version is the set of features that it knows. What a frame has is told here by its bytes, and not by what its gateway
says of it, so a frame that a node applies and cannot read is a Mismatch, and so is a feature that is switched on while
a node says that it has not got it.
"""

from __future__ import annotations

from typing import Final

import kivi
from kivi.errors import FeatureOff, FormatTooNew, KiviError
from kivi.log import Entry, Kind
from kivi.log.features import FEATURES, MOVES, WEIGHTED_QUANTILES
from kivi.log.members import State
from kivi.log.replicated import Arrived
from kivi.log.shards import EVERY
from tests.cluster.sharded import Moving
from tests.cluster.simulation import _MAY_FAIL, Node
from tests.oracle import Mismatch

__all__ = ["Upgrading"]

VERSIONS: Final = [frozenset[str](), frozenset({MOVES}), frozenset(FEATURES)]
WEIGHED: Final = {"p": kivi.weighted_quantiles("x", by="x")}


def _upgraded(steps: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    of_moving = [step for step in steps if step[0] not in ("narrow", "ask")]
    return (*of_moving, ("narrow", 1.0), ("ask", 6.0), ("upgrade", 4.0), ("upgrade_all", 0.8), ("weigh", 4.0))


class Upgrading(Moving):
    """Nodes are upgraded, and set back to older versions, while clients use what the features are for."""

    QUIET = _upgraded(Moving.QUIET)
    ROUGH = _upgraded(Moving.ROUGH)

    def version(self) -> frozenset[str]:
        return self.rng.choice(VERSIONS)

    def do_upgrade(self) -> None:
        """A node is stopped, and started again in another version, or at least that is tried."""
        if len([node for node in self.nodes if node.serves]) > 1 and (node := self._serving()) is not None:
            node.kill()
            node.can = self.version()
            self.note(f"version {node.id} {len(node.can)}")
            self.after(self.rng.randint(10_000, 500_000), lambda: self._back(node))

    def do_upgrade_all(self) -> None:
        """Somebody upgrades them all, one by one."""
        for node in self.nodes:
            if node.serves and len([one for one in self.nodes if one.serves]) > 1:
                node.kill()
                node.can = frozenset(FEATURES)
                node.start()

    def do_weigh(self) -> None:
        """A client makes an aggregate that old versions cannot read, or drops it."""
        node = self._serving()
        if node is None or node.store is None or node.held != EVERY or WEIGHTED_QUANTILES not in node.can:
            return
        there = "weighed" in node.store.catalog.entered.by_name
        node.client.calm = True
        try:
            with self._waiting_for(node):
                if there:
                    node.db.drop("weighed")
                else:
                    node.db.create_aggregate("weighed", source="e", group_by=["a"], measures=WEIGHED)
                    self.counted["weighed"] += 1
        except FeatureOff as error:
            self.counted["FeatureOff weighted_quantiles"] += 1
            if not error.details["nodes"] and WEIGHTED_QUANTILES not in node.log.members.on:
                self.counted["it came too late"] += 1
        except KiviError as error:
            if not isinstance(error, (*_MAY_FAIL, kivi.Unavailable, FormatTooNew)) and node.log.failed is None:
                raise Mismatch(f"a definition failed: {error}") from error
        finally:
            node.client.calm = False

    # -- what is checked --------------------------------------------------------------------------------

    def arriving(self, node: Node, arrived: Arrived) -> None:
        """Before a node applies a frame."""
        for entry in arrived.frame.entries:
            if lacks := _of(entry) - node.can:
                raise Mismatch(f"node {node.id} applies what it cannot read: {lacks}")

    def arrived(self, node: Node, arrived: Arrived, before: frozenset[str]) -> None:
        """Behind it."""
        for on in node.log.members.on - before:
            self.counted[f"on {on}"] += 1
            if on not in node.can:
                raise Mismatch(f"node {node.id} goes on behind the place where {on} is switched on")
            for member in node.log.members:
                if member.state is State.LIVE and on not in member.about["features"]:
                    raise Mismatch(f"node {member.node} is live, and lacks {on}, which is on")

    def refused(self, node: Node, error: KiviError) -> None:
        """A node does not start, or does not go on, because of its version: it is upgraded."""
        if not isinstance(error, FormatTooNew) or all(on in node.can for on in FEATURES if on in error.message):
            raise Mismatch(f"node {node.id} stopped: {error.message}")
        self.counted["refused"] += 1
        node.can = frozenset(FEATURES)

    def _look_after(self) -> None:
        for node in self.nodes:
            if node.store is not None and isinstance(node.log.failed, FormatTooNew):
                self.refused(node, node.log.failed)
                node.kill()
                node.start()
        super()._look_after()


def _of(entry: Entry) -> set[str]:
    """The features that an entry has."""
    body = b"".join(entry.body)
    found = {MOVES} if entry.kind is Kind.MEMBER and body.startswith(b"{") else set[str]()
    return found | ({WEIGHTED_QUANTILES} if entry.kind is Kind.COMMIT and b"weighted_quantiles" in body else set())
