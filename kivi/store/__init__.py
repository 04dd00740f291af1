"""One store: the rooms below wired into transactions, reads, tables and what the background does.

    facade         ``Store``: the operations that the embedded database and the server share
    wiring         the parts of a store, each wired to those that it uses; ``host``: which of them helpers may use
    opening        the directory, its lock, and what a store is made of; ``replay`` fills its memory
    catalog        which tables there are, kept in rows of the store itself; ``tables`` creates and drops them
    snapshots      leases, as callers ask for them
    transaction    a transaction before it commits, and how it becomes one commit record
    commits        from transactions, write sets and events to parts of a group, and to outcomes
    event_commits  events that are each a transaction; ``overwrite``: a table whose whole content is replaced
    plans          reading small requests, held to their tables' columns by plans that are made once
    staging        data that is durable and invisible until a commit names it
    reads          rows by key, and scans as Arrow record batches
    rollups        rows of an aggregate combined to a coarser level; ``slot_ranges``: which keys to read for a time
    change_reads   what was committed to a table after a timestamp
    event_tables   the blocks of each event table; ``retention``: how it forgets
    raising        matches of a pattern as events, for rules; ``decided``: which matches no event changes any more
    backfill       an aggregate on a table that has events already
    housekeeping   what nobody needs any more
    checkpoint     a copy that opens by itself; ``backups``: copies that share files
    statistics     what is cheap to know; ``splitting``: where to cut a table for many readers
    checks         limits of what callers send

Comes in: values in stored form. Goes out: the same, and outcomes. May not touch: the server, the wire, clients. Begin
reading at ``facade``.
"""
