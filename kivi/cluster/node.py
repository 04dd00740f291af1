"""One node of a cluster: its store, its connection to the log, and the thread that applies what the log brings.

::

    directory   KIVI names the cluster, its generation and the node; engine/ as ever, and no log/: it is elsewhere
    stream      kivi-NAME: its metadata has the generation, given by whoever made it
    engine      the node's boot (one more with every start), and its place in the log

A new node begins with the first message of the log, or with a checkpoint or a backup of another node, which becomes a
node of its own when it is opened as one. While a copy is on its way the log is kept for it, for an hour.

Every so often a node *says* from where it may have to read again; that is a heartbeat, too, and carries the running
hash of all that it has applied (``kivi.log.members``, ``kivi.log.frames``). One of the nodes, the live one with the
least number, moves the floor of the log up and deletes what lies below it. If the log is nearly full all the same,
whoever holds it back is evicted by an entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, KiviError, Unavailable
from kivi.log import CommitLog
from kivi.log.jetstream import JetStream
from kivi.log.members import Member, State, truncation
from kivi.log.natslink import Nats
from kivi.log.replicated import ReplicatedLog
from kivi.mvcc.replicated import PLACE, ReplicatedCommitter
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.opening import claim_node

__all__ = ["LOG_BYTES", "ClusterNode"]

_log = logging.getLogger("kivi.cluster")
_BOOT: Final = meta_key("boot")
_CHANCE_BITS: Final = 24
_GENERATION: Final = "kivi.generation"
_LIMITS: Final = "kivi.limits"
_JUDGED_BY: Final = ("conflict_window_s", "conflict_entries", "request_token_ttl_s")
"""Settings that a verdict depends on: they are the cluster's."""
LOG_BYTES: Final = 64 << 30
"""How large the log may become, unless it is told."""
_FULL: Final = 0.8
"""Of the log's bytes: from here on, whoever holds it back is evicted."""
_WAIT_S: Final = 0.2
_RETRY_S: Final = 0.5
_SAY_S: Final = 1.0
_SLACK: Final = 4_096
"""So many messages are worth an entry that truncates, or a flush of a node that has nothing else to write."""
_KEPT: Final = 0.25
"""Of the log's bytes: below it nothing is truncated, so that a new node can begin with the first message."""
_HOLD_S: Final = 30.0
_HEARD_US: Final = 30_000_000
"""A node that has said nothing for so long, by the log's time, is not the one that others leave the log to."""


class ClusterNode:
    """A node that has applied all that the log had when it was opened. ``about`` is what it says of itself.
    ``copies`` of the log, by default as many as there are ``servers``, up to three; ``login`` as ``Nats`` takes it.

    Raises InvalidArgument for a directory that belongs to no cluster, or to another one; DataLoss if the log does not
    reach back to what the node has; Unavailable if the log's servers cannot be reached.
    """

    def __init__(
        self,
        path: str,
        name: str,
        servers: Sequence[str],
        *,
        about: dict[str, Any] | None = None,
        settings: Settings | None = None,
        log_bytes: int = LOG_BYTES,
        copies: int | None = None,
        login: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.name, self.about = name, about or {}
        self.log_bytes = log_bytes
        self._news = threading.Event()
        self._ending, self._ended = False, threading.Event()
        chosen = settings or Settings()
        limits = json.dumps({each: getattr(chosen, each) for each in _JUDGED_BY})
        with contextlib.ExitStack() as opened:
            self._nats = Nats(servers, timeout_s=timeout_s, **login or {})
            opened.callback(self._nats.close)
            self.stream = JetStream(
                self._nats,
                f"kivi-{name}",
                max_bytes=log_bytes,
                copies=copies,
                metadata={_GENERATION: secrets.token_hex(16), _LIMITS: limits},
                timeout_s=timeout_s,
            )
            self.generation = self._generation()
            if (known := self.stream.metadata.get(_LIMITS)) != limits:
                raise InvalidArgument(
                    f"the nodes of {name} judge commits by the settings {known}, and this one has {limits}: give it "
                    "those"
                )
            self._number = claim_node(path, name, self.generation)
            self.store = Store.open(path, settings=settings, make_log=self._log_of)
            opened.callback(self.store.crash)
            self.store.before_copy = self._hold
            self.stream.on_news = self._news.set
            self._threads = [
                threading.Thread(target=run, name=f"kivi-cluster-{run.__name__}", daemon=True)
                for run in (self._run, self._keep)
            ]
            for thread in self._threads:
                thread.start()
            opened.callback(self._end)
            self.committer.newest(timeout_s, [self._live().entry()])  # it has all that there is, and is known
            opened.pop_all()

    def _generation(self) -> bytes:
        try:
            return bytes.fromhex(self.stream.metadata[_GENERATION])
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"the stream {self.stream.name} was not made by kivi: name another cluster, or delete the stream"
            ) from None

    def _log_of(self, engine: Engine) -> CommitLog:
        starts = (int.from_bytes(engine.get(_BOOT) or b"", "little") >> _CHANCE_BITS) + 1
        boot = starts << _CHANCE_BITS | secrets.randbits(_CHANCE_BITS)  # a copy of the directory has another one
        batch = WriteBatch()
        batch.put(_BOOT, boot.to_bytes(8, "little"))
        engine.write(batch)
        engine.flush()  # a boot that comes twice would be two processes in one
        self.log = ReplicatedLog(
            self.stream, generation=self.generation, node=self._number, boot=boot, saved=engine.get(PLACE)
        )
        return self.log

    @property
    def id(self) -> int:
        return self.log.node

    @property
    def committer(self) -> ReplicatedCommitter:
        committer = self.store.committer
        assert isinstance(committer, ReplicatedCommitter)
        return committer

    # -- the log's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Applies what the log brings. Whatever keeps it from that for good ends the node's answers (C5)."""
        retried = time.monotonic()
        while not self._ending and self.log.failed is None:
            self._news.wait(_WAIT_S)
            self._news.clear()
            try:
                while self.log.pump() and not self._ending:
                    pass
                if time.monotonic() - retried > _RETRY_S:
                    retried = time.monotonic()
                    self.log.outbox.retry()
            except Unavailable as error:  # until some server of the log answers
                _log.debug("the log cannot be read now: %s", error.message)
            except Exception as error:
                _log.exception("applying the log has failed")
                self.log.fail(DataLoss(f"applying the log has failed: {error!r}"))

    def _keep(self) -> None:
        """Says what others need to know of this node, and does what falls to it, in a thread that may wait."""
        while not self._ended.wait(_SAY_S) and self.log.failed is None:
            try:
                self._say()
            except KiviError as error:
                _log.debug("nothing is said now: %s", error.message)
            except Exception:
                _log.exception("saying what this node needs has failed")

    def _say(self) -> None:
        if self.log.proposed < 2:  # while nothing comes back it need not be said again
            self.committer.say([self._live().entry()], lambda error, number: None)
        if self.log.place.sequence - self.log.needed > _SLACK:
            self.store.consolidator.save_place()
        with self.committer.entry_lock:
            floor, time_us = self.log.members.floor, self.log.place.time_us
            members, holding = list(self.log.members), self.log.members.holding()
        heard = [m.node for m in members if m.state is State.LIVE and time_us - m.said_us < _HEARD_US]
        if not heard or min(heard) != self.id or not holding:
            return
        used = self.stream.nbytes() / self.log_bytes
        if used > _KEPT and holding[0].needed - floor > _SLACK:
            self.committer.say([truncation(holding[0].needed)], lambda error, number: None)
        if used > _FULL and holding[0].node != self.id:
            _log.warning("node %x holds the log back, which is nearly full: it is evicted", holding[0].node)
            evicted = dataclasses.replace(holding[0], state=State.EVICTED)
            self.committer.say([evicted.entry()], lambda error, number: None)
        self.stream.purge(floor)

    def _hold(self) -> None:
        """Before a copy is made: the log is kept for whoever will begin with it. Raises Unavailable if it is not."""
        self.store.consolidate()
        with self.store.consolidator.mutex:
            self.store.consolidator.flush()
        copy = Member(int.from_bytes(secrets.token_bytes(7), "little"), State.JOINING, self.log.needed)
        self.committer.newest(_HOLD_S, [copy.entry()])
        held = self.log.members.find(copy.node)
        if held is None or held.state is not State.JOINING:
            raise Unavailable("the log was truncated before it could be kept for a copy: try again")

    def _live(self) -> Member:
        return Member(self.id, State.LIVE, self.log.needed, self.about)

    def close(self) -> None:
        """Stops reading the log, folds and flushes. Harmless twice."""
        self._end()
        self.store.close()
        self._nats.close()

    def _end(self) -> None:
        self._ending = True
        self._ended.set()
        self._news.set()
        for thread in self._threads:
            thread.join()
        self.log.stop()  # consolidation, too, may wait for what does not come back any more
