"""SQL: a question in DuckDB's language over the tables of one snapshot, answered in columns.

Comes in: a text, its parameters, a way to find a table by its name (as a pyarrow Dataset), and limits. Goes out: Arrow
record batches. May not touch: the store, files, the network. This room alone loads DuckDB (the extra ``kivi[sql]``).

::

    text --> exactly one SELECT --> the names in it --> datasets of the snapshot, as views
                                                             |  columns and filters pushed down
    record batches <-- DuckDB, in memory, locked <-----------+

**What holds.** DuckDB sees the tables that ``find`` gives it and nothing else, whoever wrote the text:

* The database is in memory, made for this question and thrown away with it. It has no access to files, networks and
  extensions (``enable_external_access``), nor to variables of Python (``python_enable_replacements``), does not spill,
  and its settings are locked before the text is looked at, so that nothing of this can be undone.
* One statement that reads: everything else is refused before it runs.
* A table is registered because its name stands in the text, and after ``find`` has agreed. What a text makes up while
  it runs (``query_table('a' || 'b')``) is found only if it is registered already.
* Memory, threads, time and rows are limited. Beyond a limit it is ResourceExhausted, and no answer.

In process the question runs in the caller's own process; a server runs it in another one that it can kill
(``kivi_server.sql``). Which engine, and why: decision 0040. Begin reading at ``engine``.
"""

from __future__ import annotations

from kivi.sql.engine import Limits, answer, as_table, check_text, relation, resolve

__all__ = ["Limits", "answer", "as_table", "check_text", "relation", "resolve"]
