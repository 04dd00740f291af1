"""Transactions over versions: the essay. Read this first, then ``verdict``, ``groups``, ``commit`` and ``snapshot``.

Comes in: parts of groups, which somebody derived and encoded, and reads at a snapshot. Goes out: outcomes, rows and
batches as of that snapshot. May not touch: the catalog, event blocks, the store; only ``log``, ``engine``, ``delta``
and what lies below them.

**Versions.** Every commit gets a *commit timestamp* (CTS): the sequence number of its record in the commit
log. Every transaction reads at a *snapshot* S, its start timestamp. A cell at S is its newest base version
with CTS <= S, and the operations after it up to S, in CTS order.

::

              cts   0        1         2         3                       W = 2: readers get 2
    (252, 17:50)  (13,1)  +(16,1)   +(21,1)   +(5,1)
                    |        |         |         `-- in flight: durable or not, invisible
                    |        `---------'------------ pending: delta rows, in memory and in the log
                    `------------------------------- base: a value row in the engine

    read at 0: (13,1)      read at 1: (29,2)      read at 2: (50,3)      nobody can read at 3

**The oracle** is the log itself: entering it assigns the CTS, in chain order (``commit``). **The watermark** W
is the largest t such that every CTS <= t is finished; a new reader gets W (``watermark``). Commits finish in
any order. While 1 is in flight and 2 is done, readers get 0: at 2 they would miss 1.

**Conflicts** are between *cells*, and only between operations that do not commute: put against put, put against
delta, anything against delete and insert, guard against writes (``verdict``, a pure function of records in log
order). Delta against delta never conflicts, which is the point of this store.

**Consolidation** folds pending operations into base, up to W, a little at a time (``consolidate``). Where an open
snapshot or a table's history needs an older version, it keeps one in a version key space. It changes no answer
at any readable S: operations at or below a base row's stamp are inert, so *when* it ran cannot be seen.

::

    before   base (13,1)@0      pending +(16,1)@1  +(21,1)@2        reader open at S=1
    after    base (50,3)@2      version (29,2)@1                    the reader at 1 still sees (29,2)

Base is not written for every commit. In between, the deltas of aggregates that commits left in pending are
*combined* in memory (``combine``): those that every snapshot that is or can be opened sees together, or not at
all, become one. They wait some seconds for their fold, so a row that a thousand commits touch is written once.

**Groups.** Commits that arrive together enter together (``groups``): a part of a group is members of one shape, in
columns, and every part goes through the same steps. Each member is a transaction with its own verdict, CTS and outcome,
as if they had entered one after the other. A member that has read nothing begins just before its own CTS::

    member       put a=1    +2 on a    put a=7    +1 on b
    cts          41         42         43         44             W goes from 40 to 44 in one step,
    a, as of it  1          3          7          7              and "as of 42" reads 3 all the same

Events that are each a transaction are one record of the log, which has as many numbers as it has members.

**Leases.** An open snapshot is a lease with a time limit (``leases``). A reader never makes a writer wait: if its
versions cost too much, the oldest lease is cut and its reader gets SNAPSHOT_TOO_OLD, never a guess.

**Isolation** is snapshot isolation with conflict-free deltas. Write skew is possible; ``guard`` on the cells and
rows that were read prevents it, not on ranges.

Where each invariant is enforced:

    R2, R4, R5, R8   verdict.Facts.check, under commit.Committer's entry lock
    R11, R12         watermark.Watermark; Committer finishes a CTS only after its sync and its entry in pending
    R13              sequence numbers of the log never regress; W only passes durable records
    R14              leases.Leases.boundaries: one mutex for "register S = W" and "fold up to W, keeping these"
    R15              Leases.check, after every read and before every commit
    R16              tokens.Tokens, looked up under the entry lock, recorded in the commit's own log record
    R18, R19         Committer.submit takes the parts of a group through the steps in that order

The files:

    groups       parts of a group: any transaction, deltas and puts, events that are each a transaction
    commit       the steps of a group, from its tokens to its outcomes
    replicated   these steps where a log orders that many nodes read; ``prefix``: what its verdicts depend on
    verdict      what conflicts with what; ``record`` is how a commit lies in the log
    watermark    what a new reader gets; ``leases`` are the snapshots that are open
    tokens       what became of the commits under a token; ``timeline``: which CTS was current at a moment
    pending      operations that are not in base yet; ``applied`` is what commits bring, ``feed`` hands it to followers
    snapshot     what a read sees; ``columns``: the same for thousands of rows
    consolidate  the passes; ``folding``, ``combine`` and ``sweep`` are their steps
    shortage     what happens while there is no room; ``turns``: who computes in columns when

Not done here: serializability, range guards.
"""
