"""Goal 9: live queries. Writes against range queries on one core, and what a thousand subscribers cost commits.

* *Matching*: N range queries (``low <= value < high``, each selecting one write in 50,000) and M writes a second. Each
  write is a commit of its own; they begin in bursts, one in 5 ms, at moments that do not depend on answers. A match is
  one write compared with one query, so there are N times M a second; latency is from the begin of the call that commits
  to the moment at which the update with that row is in the subscriber's hands. Over a row table, where rows also leave
  results, and over an event table. The published design that this is held against matches 1.5 to 1.8 million a second
  on a core at 1,500 queries and 1,000 writes a second, and tells its subscribers within 15 to 20 ms in 99 of 100 cases.
  From there the queries are doubled, and then the writes, for as long as the 99th percentile is at most 20 ms and the
  writes keep their pace. Many queries (24,000) at 1,000 writes a second, and 1,000 at 16,000, are measured in any case.
* *An echo* at the same pace on the same core: a notification is a commit and two messages, and how late an empty call
  is now and then says how late the machine makes both.
* *The matcher alone*, in this process: the comparisons without commits, reading, and telling.
* *Durable subscriptions*: a hundred thousand of them, stored and not connected, beside ten thousand events a second:
  what they cost the events and the server's memory, and how soon one that returns has its first event.
* *Pages over HTTP* (``pages``): 24,000 clients of server-sent events on 1,000 distinct queries, an update of each a
  second. Wanted: 99 of 100 events within a second of the commit, at most 5 ms more than over gRPC in the middle, and
  other commits at 0.8 of their rate.
* *Commits beside subscribers*: the append stream of goal 1 and the transactions of goal 3, with a thousand subscribers
  that get one state a second, and without them, in turn. Wanted: at most a fifth less.

**One core**: the server is pinned to the first core, with all that it does there: commits, gRPC, matching, telling (the
published figure is of a node that only matches). Otherwise its threads would use what other cores leave idle, and "a
core" would be a guess. Writers and subscribers have the other cores. Commits beside subscribers are not pinned.

Heartbeats say that a stream is alive; here once in 10 s (not each second, the default), since each is a message of its
own, and thousands of streams of one machine are not what they are for.

Verified: of events each subscriber got exactly those that its query selects, once; of rows, it ends with exactly those
that are selected then, and got none twice and none that its query does not select.
"""

from __future__ import annotations

from bench import beside, durable, matching, notified, pages
from bench.context import Context
from bench.cores import pinned, shared_out
from bench.sheet import Figures, Ratio, Sheet

__all__ = ["sheet", "take"]


def sheet() -> Sheet:
    ratios = []
    for kind in notified.KINDS:

        def p99(figures: Figures, kind: str = kind) -> float:
            return figures["kivi", f"{kind}, {notified.BASE}, p99"]

        def most(figures: Figures, kind: str = kind) -> float:
            return figures["kivi", f"{kind}, most within 20 ms"] / 1e6

        ratios.append(Ratio(f"{kind}, {notified.BASE}: notification, p99 in ms", p99, at_most=notified.P99_MS_MAX))

        def of_echo(figures: Figures, kind: str = kind) -> float:
            return (
                figures["kivi", f"{kind}, {notified.BASE}, p99"]
                / figures["echo", f"{notified.WRITES_S:,} calls/s, p99"]
            )

        ratios.append(Ratio(f"{kind}, {notified.BASE}: notification, p99 / that of an echo", of_echo))
        ratios.append(Ratio(f"{kind}: million matches a second, p99 within 20 ms", most, at_least=1.8))
        for queries, writes_s in notified.WIDE:
            wide = f"{kind}, {notified.point(queries, writes_s)}"

            def told(figures: Figures, wide: str = wide) -> float:
                return figures["kivi", f"{wide}, p99"]

            ratios.append(Ratio(f"{wide}: notification, p99 in ms", told, at_most=notified.WIDE_P99_MS_MAX))

    def kept(figures: Figures) -> float:
        return figures["kivi", f"{durable.EVENTS_S:,} events/s, {durable.STORED}"] / durable.EVENTS_S

    ratios.append(Ratio(f"{durable.EVENTS_S:,} events/s, {durable.STORED}: of the pace", kept, at_least=0.98))

    def late_by(figures: Figures) -> float:
        return figures["HTTP", f"{pages.EVENT}, p50"] - figures["gRPC", f"{pages.EVENT}, p50"]

    def beside_pages(figures: Figures) -> float:
        return figures["kivi", f"{pages.BESIDE}, with clients"] / figures["kivi", f"{pages.BESIDE}, alone"]

    ratios.append(
        Ratio(f"{pages.EVENT}: p99 over HTTP in ms", lambda f: f["HTTP", f"{pages.EVENT}, p99"], at_most=1_000.0)
    )
    ratios.append(Ratio(f"{pages.EVENT}: p50 over HTTP less that over gRPC, in ms", late_by, at_most=5.0))
    ratios.append(Ratio(f"{pages.BESIDE}: with clients / alone", beside_pages, at_least=0.8))
    for name in beside.CASES:

        def share(figures: Figures, name: str = name) -> float:
            return figures["kivi", f"{name}, {beside.WITH}"] / figures["kivi", f"{name}, alone"]

        ratios.append(Ratio(f"{name}: {beside.WITH} / alone", share, at_least=0.8))

        def with_hub(figures: Figures, name: str = name) -> float:
            return figures["kivi", f"{name}{beside.HUB}, {beside.WITH}"] / figures["kivi", f"{name}, alone"]

        def cpu(figures: Figures, name: str = name) -> float:
            of = "processor time of who commits"
            return figures["kivi", f"{name}{beside.HUB}, {beside.WITH}, {of}"] / figures["kivi", f"{name}, alone, {of}"]

        ratios.append(Ratio(f"{name}: hub and {beside.WITH} / alone, no hub", with_hub, at_least=0.9))
        ratios.append(Ratio(f"{name}: processor time of who commits, likewise", cpu, at_most=1.1))
    return Sheet("goal9", "Live queries: matches a second on one core, notifications, commits beside them", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    server, clients = shared_out()
    with pinned(server):
        matching.take(context, sheet)
    with pinned(clients):
        notified.echoed(context, sheet, server)
        for kind in notified.KINDS:
            notified.take(context, sheet, kind, server)
    durable.take(context, sheet)
    pages.take(context, sheet)
    beside.take(context, sheet)
