"""OpenTelemetry in: traces and metrics by OTLP/gRPC and OTLP/HTTP, from any SDK or collector, as events.

::

    Export (gRPC), /v1/traces  ->  spans: decode, columns  ->  intake: a writer each  ->  event tables, aggregates
                                                                   `-- window: the span ids of the last minutes

============ ==========================================================================
``listener`` the calls Export of gRPC; ``over_http``: the same of HTTP; ``answers``: what both say
``exports``  each span and point of an export to the intake of its table, and one answer
``spans``    which spans count, and their columns: plain data in, plain data out
``points``   the same of metrics, for ``metric_tables``; from there on a point's parts are as spans are
``recall``   the window as it was, from the table; ``kivi.arrow.id_window`` is the window
``intake``   the one writer: leaves out what was taken, commits, answers
``tables``   the table and its aggregates, created where they are missing
============ ==========================================================================

Which spans count. SERVER and CONSUMER are invocations: one request answered, one message processed; CLIENT and PRODUCER
are outgoing calls, and calls to language models, of whatever other kind, go to a table of their own (``tables``). All
other spans are passed over, which is no error and not told to the sender.

What is late. A span that ended below the table's retention floor cannot be stored. With ``--otlp-late fail``, the
default, it is refused as an append's late events are, but alone: the others of its export are stored, and the answer's
``partial_success`` says how many were not and why, which tells the sender and has nothing sent again (OTLP, "Partial
success"). With ``drop`` it is one of the usable spans, which the commit leaves out and counts (``describe``,
``late_dropped``), and the sender is told nothing. The default is the one that loses nothing in silence.

**Invariants.**

1. *Export is acknowledged only when every usable span of it is in the table, durable and visible*, or was dropped as
   late by a commit that has counted it. ``intake`` answers from the outcome of the commit, or, where nothing of the
   request was new, after that of the spans it repeats.
2. *Of one span (trace id and span id) at most one event is in the table from commits less than the window apart*,
   however exports are repeated, regrouped or sent at the same time, and whenever the server is killed. Why:

   * A span is for one table, each table has one writer, the task in ``intake``, and one process owns a store. The
     writer begins a commit only after it knows the outcome of the one before. So two exports never race: the second
     finds what the first has committed.
   * It leaves out of a commit what ``window`` knows, and what occurs in it twice.
   * ``window`` is never written anywhere: at the start, and whenever the table has become another one, it is read from
     the table itself, the ids of all events that were committed within the window. An event and the memory of it are
     thus the same bytes of the same log record, and no crash can come between the two.
   * If an outcome is unknown (the log failed), the writer takes nothing more: the process ends, and the next one reads
     which it was.
   * ``window`` forgets ids by the age of their commit only. If there are more than it may hold, exports are refused
     until some are old enough; none is forgotten early.

In a cluster (``kivi serve --cluster``) 2 holds for all nodes together, which are to have the same ``--otlp-window``:
there the window is of the log, and any node may write. A commit is refused, by all nodes alike, if a span of it was
taken by any of them (``kivi.mvcc.deduplication``); it is then tried again without that. An ``--otlp-window`` begins
empty in a cluster that was made of a store.

A span that is sent again later than that is counted again, and so are spans that somebody appends to the table by other
means. The ids of spans that were dropped as late are in ``window``, but not in the table: if one is sent again after a
restart of the server, it is dropped, and counted as dropped, again. Across a restart the age of commits goes by their
commit times, which follow the machine's clock, but never back.

Comes in: exports of strangers. Goes out: commits of events, and answers. May not touch: sessions, and tables other than
its own. Begin reading at ``intake``.
"""

from __future__ import annotations
