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
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, KiviError, Unavailable
from kivi.log import CommitLog, Entry
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
_GENERATION: Final = "kivi.generation"
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


class ClusterNode:
    """A node that has applied all that the log had when it was opened. ``about`` is what it says of itself.

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
        timeout_s: float = 60.0,
    ) -> None:
        self.name, self.about = name, about or {}
        self.log_bytes = log_bytes
        self._news = threading.Event()
        self._ending = False
        self.problem: KiviError | None = None
        """Why the log cannot be read now."""
        with contextlib.ExitStack() as opened:
            self._nats = Nats(servers, timeout_s=timeout_s)
            opened.callback(self._nats.close)
            self.stream = JetStream(
                self._nats,
                f"kivi-{name}",
                max_bytes=log_bytes,
                metadata={_GENERATION: secrets.token_hex(16)},
                timeout_s=timeout_s,
            )
            self.generation = self._generation()
            self._number = claim_node(path, name, self.generation)
            self.store = Store.open(path, settings=settings, make_log=self._log_of)
            opened.callback(self.store.crash)
            self.store.before_copy = self._hold
            self.stream.on_news = self._news.set
            self._thread = threading.Thread(target=self._run, name="kivi-cluster-log", daemon=True)
            self._thread.start()
            opened.callback(self._end)
            self._catch_up(timeout_s)
            self._opened = opened.pop_all()

    def _generation(self) -> bytes:
        try:
            return bytes.fromhex(self.stream.metadata[_GENERATION])
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"the stream {self.stream.name} was not made by kivi: name another cluster, or delete the stream"
            ) from None

    def _log_of(self, engine: Engine) -> CommitLog:
        boot = int.from_bytes(engine.get(_BOOT) or b"", "little") + 1
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
        retried = said = time.monotonic()
        while not self._ending:
            self._news.wait(_WAIT_S)
            self._news.clear()
            try:
                while self.log.pump() and not self._ending:
                    pass
                self.problem = self.log.failed
            except Unavailable as error:
                self.problem = error
            except Exception as error:  # no answer may come from a state that nobody understands
                _log.exception("applying the log has failed")
                self.log.fail(DataLoss(f"applying the log has failed: {error!r}"))
            if self.log.failed is not None:
                return
            now = time.monotonic()
            if now - retried > _RETRY_S:
                retried = now
                with contextlib.suppress(KiviError):
                    self.log.outbox.retry()
            if now - said > _SAY_S:
                said = now
                with contextlib.suppress(KiviError):
                    self._say()

    def _say(self) -> None:
        """What others need to know of this node; and what the log can do without, if it falls to this node."""
        if self.log.proposed < 2:  # while nothing comes back it need not be said again
            self.committer.say([self._live().entry()], lambda error, number: None)
        if self.log.place.sequence - self.log.needed > _SLACK:
            self.store.consolidator.save_place()
        members = self.log.members
        live = [member.node for member in members if member.state is State.LIVE]
        if not live or min(live) != self.id:
            return
        holding = members.holding()
        used = self.stream.nbytes() / self.log_bytes
        if used > _KEPT and holding and holding[0].needed - members.floor > _SLACK:
            self.committer.say([truncation(holding[0].needed)], lambda error, number: None)
        if used > _FULL and holding and holding[0].node != self.id:
            _log.warning("node %x holds the log back, which is nearly full: it is evicted", holding[0].node)
            evicted = dataclasses.replace(holding[0], state=State.EVICTED)
            self.committer.say([evicted.entry()], lambda error, number: None)
        self.stream.purge(members.floor)

    def _hold(self) -> None:
        """Before a copy is made: the log is kept for whoever will begin with it. Raises Unavailable if it is not."""
        self.store.consolidate()
        self.store.consolidator.flush()
        copy = Member(int.from_bytes(secrets.token_bytes(7), "little"), State.JOINING, self.log.needed)
        self.barrier(_HOLD_S, copy.entry())
        held = self.log.members.find(copy.node)
        if held is None or held.state is not State.JOINING:
            raise Unavailable("the log was truncated before it could be kept for a copy: try again")

    def _live(self) -> Member:
        return Member(self.id, State.LIVE, self.log.needed, self.about)

    def _catch_up(self, timeout_s: float) -> None:
        """Waits until all is applied that the log had by now, and the node is known to the others."""
        self.barrier(timeout_s)

    # -- what callers ask -------------------------------------------------------------------------

    def barrier(self, timeout_s: float, *entries: Entry) -> int:
        """Waits until this node has applied everything that was acknowledged before the call, by whomever.

        And ``entries``, which it says with that.

        The commit timestamp that a reader has to see. Raises Unavailable when the time is up.
        """
        told: Future[int] = Future()

        def done(error: BaseException | None, number: int) -> None:
            if error is None:
                told.set_result(number)
            else:
                told.set_exception(error)

        self.committer.say([self._live().entry(), *entries], done)
        try:
            return told.result(timeout_s)
        except FutureTimeout:
            why = f" ({self.problem.message})" if self.problem is not None else ""
            raise Unavailable(f"this node has not caught up with the log in {timeout_s:.0f} s{why}") from None

    @property
    def staleness_s(self) -> float:
        """How old what this node answers may be: everything that was there so long ago has been applied."""
        return self.log.age_s

    def status(self) -> dict[str, Any]:
        """What ``kivi cluster status`` shows: this node, the others as the log knows them, the log."""
        first, last = self.stream.bounds()
        place = self.log.place
        nodes = [
            {
                "node": f"{member.node:x}",
                "state": str(member.state),
                "needed": member.needed,
                "said_s_ago": (place.time_us - member.said_us) / 1e6,
                **member.about,
            }
            for member in self.log.members
        ]
        return {
            "cluster": self.name,
            "node": f"{self.id:x}",
            "watermark": self.store.watermark(),
            "applied": place.sequence,
            "behind_records": last - place.sequence,
            "behind_s": self.staleness_s,
            "hash": place.hash.hex(),
            "log_first": first,
            "log_last": last,
            "log_bytes": self.stream.nbytes(),
            "problem": "" if self.problem is None else self.problem.message,
            "nodes": nodes,
        }

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops reading the log, folds and flushes. Harmless twice."""
        self._end()
        self.store.close()
        self._nats.close()

    def crash(self) -> None:
        """For tests: as if the process had been killed."""
        self._opened.close()

    def _end(self) -> None:
        self._ending = True
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
