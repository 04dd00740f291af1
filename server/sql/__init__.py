"""Questions in SQL on a server: each is computed in a process that can be killed, and that sees what it is handed.

Comes in: a question, a way to find a table and one to scan it. Goes out: pages of its answer, as the process encoded
them. May not touch: the store. Begin reading at ``workers``.

::

    a session's request          the server                       its process (``worker``)
    -------------------          ----------                       -------------------------------------
    Sql                    -->   Workers.answer  -- question -->  kivi.sql: DuckDB over settled files and datasets
                                      |          <-- table ----   a name stands in the text: which table is it?
                                      |          <-- files ----   of an event table, which it reads by itself
                                      |          <-- scan -----   columns and predicate, as of any client
                                      |          <-- next -----   one batch more, while the one before is looked at
    pages                  <--        |          <-- result ---   as it is computed, no faster than it is asked for

**What holds.** A process has no store and no access token; it gets rows and names of settled files, verified ones, only
by asking its server, which looks at each table as if the caller had asked by itself. These files stay until the answer
has ended, and DuckDB opens no others. What a process sends is never unpickled, and its Arrow never
decoded here: it goes on to the client as it is. It may take so much memory (``RLIMIT_AS``: DuckDB's limit, and an
allowance beside it), and so much time, whoever waits for whom. Killed, by us or by the system, it costs its caller an
error and nobody else anything. ``sql_processes`` are there at most: each question has one for itself.
"""

from __future__ import annotations
