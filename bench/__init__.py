"""Measurements: what kivi does in a second beside its peers, the network and the disk, on the machine where it runs.

::

    make bench                       # all goals, three runs each, and bench/RESULTS.md
    make bench GOAL=1                # one of them
    python -m bench goal1 --quick    # a minute: every case once and briefly, every total verified
    python -m bench goal1 --peers duckdb,postgres --runs 5

A *goal* is a script (``goal1`` to ``goal20``) that measures kivi and whatever it is compared with, one after the other,
and does all of that again for every run.

What a number means
-------------------
* **Only ratios of one run are compared.** A machine that others use, a disk that has a bad minute, a processor that
  turns its clock down: they meet everything that is measured within the same minutes. A ratio is formed run by run; the
  results show the median of these ratios and the spread, the least and the greatest of them, over at least three runs.
  A figure of one run beside a figure of another day says nothing.
* **No rate is believed before its totals are.** After every measurement the sums, counts and rows of the aggregate are
  read back from the system that was measured, and compared with what was sent (``verify``; of kivi every single row).
  A difference ends the script: a fast wrong answer has no rate.
* **Every acknowledgement is durable and visible**, at kivi and at the peers: synced commits, with the default settings
  otherwise. The clock runs from the first call until the last acknowledgement has arrived, so whatever is in flight at
  the end is paid for.
* **kivi is measured through gRPC**: ``kivi serve`` in its own process on loopback, its data on a real disk, the client
  in another process on the same cores. Peers in a library (DuckDB, ClickHouse, SQLite, and *the limit*) have no network
  to pay for: that is their advantage, and they keep it.
* **Events are made before the clock starts**, from a seed: the same for every system (``data``).
* A warm-up of a few batches, part of the totals, goes before every clock.

Nothing here is a test with a time limit: a slow machine makes no test red. What the scripts decide by (totals) has
tests, in ``tests/test_bench.py``.

What is measured
----------------
====== ============================================================================ ===========================
goal   what                                                                         module
====== ============================================================================ ===========================
goal1  append stream, batches of 10,000 and 100,000: kivi, the limit, all peers     ``stream``
goal2  one event, one transaction, 32 producers: kivi, PostgreSQL                   ``producers``
goal3  one-delta transactions and reads of one row, beside a gRPC unary echo        ``small``
goal4  reads while the append stream runs: latency second by second, and a plot     ``reading``
goal5  eight aggregates instead of one, a million rows instead of 10,000: factors   ``factors``
goal6  200 million events: memory, bytes on disk, kill -9 and open, and a plot      ``volume``
goal7  Spark: 20 million events written and read beside Parquet, micro-batches      ``sparking``
goal8  sizes: an event and an aggregate's row on disk, an idle server in memory     ``sizing``
goal9  live queries: matches on one core, notification latency, commits beside them ``live``
goal10 percentiles and distinct counts: ingest, reads, rollups, bytes a row         ``measures``
goal11 retention over a simulated week, retraction beside loading                   ``lifetimes``
goal12 loading rows beside secondary views                                          ``views``
goal13 questions of ten days, in order and late, beside DuckDB                      ``history``
goal14 an hour at a steady rate, an hour of trouble                                 ``hours``
goal15 a cluster: what its log costs, lag, failures                                 ``nodes``
goal16 patterns over events, by how rare their rarest symbol is                     ``patterns``
goal17 what more nodes would do: applying, reading, matching, computed              ``scale``
goal18 a million stored subscriptions, beside repeated queries and PostgreSQL       ``topics``
goal19 what it is worth that an answer may be old: reads, rollups, how old           ``freshness``
goal20 the front door: spans over HTTP, an idle server, pollers, hostile clients    ``front``
====== ============================================================================ ===========================

**One event, one transaction** (goal 2, the headline): the event is inserted and added to its aggregate row, whole or
not at all, and has its own place in the order of commits: at kivi a commit timestamp (``appender(each=True)``), at
PostgreSQL a transaction id. Both are counted, and there must be as many as events. What may be compared depends on how
many events a caller has *outstanding*, sent and not acknowledged; the cases say it. At kivi 32 producers of one program
have 1,000 each. PostgreSQL has as many as it has clients, or clients times the depth of their pipelines, and its best
of all of these is what counts.

**The limit** (``peers.limit``) is what this layout could do if it cost nothing else: one lz4 Arrow block of the events
and one block of their deltas (Arrow's group_by of endpoint and slot), in one synced write batch of RocksDB, in process.
It answers no question and isolates nobody; how near a store comes to it says what its rules cost.

**The echo** (``echo``) is the cheapest call gRPC can do in Python: a unary call of 64 bytes to an asyncio server in its
own process that returns them. One call of it is the price of "one small call per item", and **one sync** is one
``fdatasync`` of a preallocated file on the disk under test.

Data (``data``): *hot* is one endpoint in one slot of five minutes, one aggregate row; *wide* is a zipf distribution
(s = 1) over 10,000 endpoints, times uniform in an hour, so 120,000 rows and some 5,000 of them in a batch of 10,000.
Times are in no order, which compresses worse than a stream that follows the clock.

Results: ``bench/results/*.json`` hold every figure of every run, the machine, the versions and the settings;
``bench/RESULTS.md`` is made of the newest of each goal. ``--quick`` writes below ``bench/results/quick``, which is not
kept: brief figures are good for seeing that a script works, and for nothing else.

Peers from PyPI live in an environment of their own, ``bench/.venv`` (``environment``), and each runs in a process of
its own; PostgreSQL is Debian's package in a cluster that is thrown away. A peer that is not there is skipped, and the
results say why.
"""
