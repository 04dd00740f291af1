"""Questions of a table's events, answered at a snapshot: grouped, measured, in windows (``kivi.model.questions``).

Comes in: a question, the events of the snapshot in their order, rows of aggregates. Goes out: an answer. May not
touch: the catalog, the log, the clock; what a snapshot sees is decided by the store, and handed over. Begin reading
at ``tally``.

::

    events --chunk--> Derivation --delta run--+
    headers of blocks -----------delta run----+--> Tally --windows--> rows --derived, having, order--> answer
    rows of an aggregate --Rolling--delta run-+

**The invariant (R24).** An answer is what an aggregate with the question's groups and measures would hold over the
events that the snapshot sees and that are asked for: deltas are derived from events by the same code, combined as those
of one transaction, and read as the same columns. Sums of floats are added in commit order within each chunk, chunks in
commit order; a chunk ends after ``CHUNK_ROWS`` events that are asked for, wherever those lie. So where an event lies
changes no bit (R23).

**The plan** (``planning``) takes rows of an aggregate for a part of the time only where they are the same deltas: same
measures, finer or equal groups, a predicate on its key alone, whole slots within the bounds and above every floor, all
events of them summed, and no sums of floats among them, whose bits depend on what was added to what. A slot that a
bound or a floor cuts is read from events. What headers of blocks know answers sums of all events of a range likewise.

**Memory** is bounded: a chunk of events, and the deltas of the groups, up to the setting ``query_bytes``; beyond it the
question is refused with ResourceExhausted, which says what to do.

Why so, and what it takes: decision 0039.

    planning    which parts of the time are answered by what
    tally       deltas by group, as they come; groups that are null; windows
    answers     the rows of an answer: what is computed of them, selected, ordered
"""
