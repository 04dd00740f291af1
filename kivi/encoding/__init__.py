"""The only code that builds or parses the bytes of keys and rows.

    keys           row keys, ordered like their values
    keyspaces      which key space a key of the engine belongs to: the first byte
    base_rows      the bytes of a base row
    arrow_rows     base rows of fixed width as Arrow columns, thousands at a time
    projection     stored rows as the columns that a read asked for
    commit_times   at which microsecond which commit entered the log
    token_blocks   request tokens as older versions kept them
    pretty         engine keys, rows and operations as people read them

Comes in: values in stored form, or bytes that a checksum has vouched for. Goes out: the other of the two. May not
touch: files, threads, clocks, and no room above ``arrow``. Begin reading at ``keyspaces``, then ``kivi dump``.
"""
