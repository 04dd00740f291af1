"""The algebra of writes: operators, what one commit does to one row, and folding.

A write carries its operation. Folding a cell is

::

    fold(base, [(cts1, op1), (cts2, op2), ...]) = opN( ... op2(op1(base)))      cts1 < cts2 < ...

and the laws that make *online* aggregates possible are

::

    SUM over integers, MIN, MAX     commutative and associative, exactly: any grouping, any order
    SUM over floats                 neither: folded strictly left to right in CTS order, one delta per
                                    transaction, so that *when* consolidation ran can never change a bit
    put, delete, insert             barriers: what came before no longer matters. A put restarts its own
                                    cell, delete and insert restart the whole row

Deltas of one operator need no order among concurrent transactions to be *accepted*; they get one, the
CTS, when they are *folded*.

::

    operators   SUM, MIN, MAX: identity, combine, permanent ids
    ops         RowOp: the net effect of one transaction on one row, and its program-order algebra (R7)
    overlay     base rows with pending operations over them, in columns
    runs        DeltaRun: the same deltas in columns, sorted, bisected, with its form in the log
    derive      events -> deltas: in columns by Arrow and NumPy kernels, row by row for a few
    order       the keys of many runs in order, or numbered in that order
    combine     runs of one transaction -> one run, as they come: what a backfill stages
    rolling     rows of an aggregate -> rows of a coarser one
    gather      runs -> base rows: the deltas of many runs by key, folded in columns or handed out in order

Comes in: operations, events and base rows. Goes out: deltas, and base rows. May not touch: I/O, clocks, threads, rooms
above; nothing here hands out a timestamp. Begin reading at ``ops``.
"""
