"""Alerts: a condition on the newest slot of an aggregate that is over, judged by event time.

::

    events ---> rows of ``on`` at S --where--> slots for which it holds --judged--> states, notifications
                                                                           |
    log's time, newest event ---> clock - lateness: which slots are over --+        one transaction (evaluator)

    inactive --holds--> pending --for ``for_``--> firing --does not hold, or no data--> resolved --a day--> inactive
        ^__________________|

**The definition.** An alert has one *instance* for each key of its table without the slot. An *evaluation* is a
transaction with a snapshot S that carries the log's time ``now``.

* *The clock* is event time. It goes on as the log's time does, and is never behind the newest event of the table's
  source, as far as that lies before ``now``: from the evaluation before, clock = max(clock + (now - its now),
  min(newest event time at S, now)). So where events are of now it is now, less what the fastest of them take to come;
  where an old stream is played again it is that stream's; and where no events come any more it goes on. An alert begins
  with the newest event that is there.
* *A slot is over* once the clock, less ``lateness``, has reached its end. What comes later into a slot that is not
  the newest of these is not looked at.
* *The condition holds* at a moment t of event time if it holds, at S, for the row of the newest slot that is over at t.
  A row that is not there, or a null, does not hold: so the absence of data ends an alert.
* It is *pending* since the moment from which on the condition has held; it *fires* since ``for_`` later, if it still
  holds then; and is *resolved* since the moment at which it ceases to, or, if it did not fire, inactive. An evaluation
  goes through all slots that have come to be over since the one before, in order, so nothing depends on how often there
  was one; of what began to fire and was resolved between two, the newest is seen, as resolved.

**Invariants.**

* What an evaluation changes (clock, instances, notifications) is one transaction on rows of the store; it puts the
  alert's position, so of two that begin with the same evaluation one conflicts (R2). So a crash leaves whole
  evaluations, and the state is what the definition gives, from evaluation to evaluation, over the log.
* An evaluation that would change nothing is none: nothing is written while nothing happens.
* Nobody who commits waits for any of this: evaluations read snapshots, and conflict with nothing but each other.
* A notification is a row until its receiver has answered. It is delivered at least once.

    judging        the definition as a pure function; ``kivi.model.alerts`` has what is declared
    evaluator      one evaluation
    rows           the rows of the store that all of this is
    messages       notifications as Alertmanager and receivers of webhooks read them
    delivery       sends them
    watcher        ``Alerts``: the thread, and what callers do

Comes in: alerts, and snapshots of the store. Goes out: rows, and HTTP. May not touch: whoever commits.
Begin reading at ``judging``.
"""

from kivi.alerts.watcher import Alerts

__all__ = ["Alerts"]
