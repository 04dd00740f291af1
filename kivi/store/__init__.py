"""One store: the rooms below wired into transactions, reads, tables and what the background does.

    facade         the wiring, and the operations that the embedded database and the server share: ``Store``
    transaction    a transaction before it commits, and how it becomes one commit record
    catalog        which tables there are, kept in rows of the store itself
    plans          reading small requests, held to their tables' columns by plans that are made once
    staging        data that is durable and invisible until a commit names it
    reads          rows by key, and scans as Arrow record batches
    change_reads   what was committed to a table after a timestamp
    retention      how an event table forgets
    backfill       an aggregate on a table that has events already
    overwrite      a table whose whole content is replaced in one commit
    splitting      where to cut a table for many readers
    recovery       opening a store, and its housekeeping
    backups        complete copies that share files

Comes in: values in stored form. Goes out: the same, and outcomes. May not touch: the server, the wire, clients. Begin
reading at ``facade``.
"""
