"""Event tables in base: blocks of columns in commit order, and settled files in the order of event time.

Comes in: batches of events with their CTS, from consolidation. Goes out: views, cut at a snapshot. May not touch:
transactions, the log, the catalog. Begin reading at ``store``.

::

    EVENT       table | 00                  meta: events_upto, rows, next id, floors, dropped, dead data
                table | 01 | order id       header of one block, in commit order
                table | 02 | number         manifest row of one settled file
    EVENT_DATA  table | data id             the block: an Arrow IPC stream, compressed by column
    events/TABLE/NUMBER.parquet             a settled file, in the store's directory
    cold/                                   whose objects are its own, and a cache of what lies there (``cold_tier``)

A block holds the events of one or more commits, or a part of one, as *runs* of (CTS, row count) in commit order, so
that a snapshot, an ``as_of`` read and a tail can cut inside it. Its header has the range of event times and, per
numeric column, min, max, the number of non-nulls and, for integers, the exact sum: ranges prune, sums answer
``summary``. Float sums are not kept, because adding them up block by block would not be the left-to-right sum. The
header has a checksum of the data as well, so damage is DataLoss that names the block, never another number.

Headers are read at every view, so they must stay small: of a block with more than 64 runs (commits of a few events) the
header has the first and the last run, and the stream's metadata has them all, compressed. Only a cut that falls inside
such a block has to look there.

Blocks have no stamp of their own. ``events_upto`` says what they include: it is written in the same engine batch as the
blocks, and one engine scan reads it together with all headers (they are neighbours), so a view is consistent by
construction. Who reads a table captures pending events first, takes a view second, and leaves out pending events at or
below ``view.events_upto``; replay after a crash leaves out the same (``seal``).

**Invariants.** Headers in key order are commits in order: a block's last CTS is at most the next one's first (equal
when a commit spans both). Every data id is named by exactly one header or by ``dead`` in meta, in every prefix of the
engine's batches: so a crash leaves no orphans, and what was waiting to be deleted is found again. Ids are never used
twice.

**Two tiers** (R23). Commit order is right while snapshots and tails cut inside recent events; event time is right ever
after. *Settling* moves the events of the oldest blocks, the *hot* ones, into immutable Parquet files, sorted by event
time and with the name of each event, (CTS, position). A file's *period* is the range of its event times: of events that
came in time it is its own, and files of late events lie across others, at most twelve at any moment
(``combining``). The header of a settled block stays in commit order, with its runs: so tails still know which commits
there are and how many events each brought, and retention which of them are gone. A reader cuts by names, not by files:
whatever was settled, it sees the events with CTS <= S, and gets them in commit order where it wants that
(``commit_order``). So nothing holds settling up, and it holds nothing up (``settling``).

Invariants: settled blocks come before all hot ones. Every event at or below ``events_upto`` that a snapshot may see is
in exactly one hot block or settled file, in every prefix of the engine's batches. A file that a manifest row names was
durable before that row was written, and is deleted only after a flush that came after the row was. Files that no row
names are deleted when the table is opened.

**The cold tier.** A settled file whose events are all old becomes an object in the table's object store, and its
manifest row says so (``cooling``). What it is, what it answers and when it goes are the same. Only when a retraction
reaches base is a cold file not looked through, since nothing there may wait for a network: the row gets the names of
the events, and settling finds their rows later.

**Compaction** merges up to eight neighbouring blocks of one size tier (a factor of eight) into one that takes the first
input's place in the order. A block never takes part only to swallow a few small ones behind it, which would rewrite it
again and again; so an event is rewritten about once per tier. The inputs' headers go in the batch that adds the output,
their data once every view that was open then has been closed.

**Retractions.** A header names, for each retraction that removed events of its block, the CTS and where it is stored
which rows those are. They are left out for every S at or past that CTS. Once no snapshot from before it is open, the
block is written again with nothing in these rows: a row keeps its place, so that names (CTS, position) stay right.
From then on such a snapshot is refused. Of settled files a manifest row names the rows likewise; and a file is written
again without these rows.

**Retention** is a floor (CTS, event time): events before the time are invisible to every S at or past the CTS, whatever
block holds them; a block that lies wholly below is dropped once no snapshot from before the floor needs it, and from
then on such a snapshot is refused, not answered in part. A settled file goes when all its events are below and all
their commits are of blocks that have gone, so that a tail finds what it would find in blocks.

    blocks          headers, meta, and the blocks themselves: how they are written and read
    settled_files   the same of settled files (``file_writing``); ``places``: where they lie; ``manifest``: their rows
    readers         Parquet's readers of what was read, kept for the next ones
    views           what a reader holds: events cut at a snapshot, pruned, scanned, summed up
    settled_views   the settled part of it; ``commit_order``: how that is put into commit order
    pruning         what facts of a block or a row group decide
    summing         measures of events, from headers or from the events
    compaction      which neighbours to merge next
    settling        hot blocks become files, files become others; ``combining``: which
    cooling         old files become objects: ``cold_tier``, ``object_store``; what was read back: ``range_cache``
    store           ``EventStore``: seals, compacts, forgets

``seal``, ``compact``, ``erase``, ``set_floor`` and ``drop_below_floor`` read meta and write it back: their caller lets
one at a time run, and writes the batch of one before it calls the next. Settling takes the same lock for its swap.
Views may be taken by any thread at any time.
"""
