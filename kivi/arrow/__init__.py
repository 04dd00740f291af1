"""Arrow: the form in which columns are appended, lie in event blocks, are computed on and handed out.

    columns        the types; columns in stored form, as NumPy for kernels and as rows
    records        what callers append -> one validated batch
    packed_events  single events, packed as they come -> one batch
    row_dicts      columns -> rows as dicts
    dictionaries   text that repeats, as numbers of its distinct values
    predicates     the rows of a batch that a predicate selects, and the values of an expression
    arithmetic     of columns, exact
    ipc            streams, also those that a stranger sent
    parquet        row groups of files, of which only what is asked for is in memory

One Arrow type per column type (``columns.arrow_type``), so that any two batches of one table can be put together and
blocks of different years have one form; text may be coded on its way to a block.

What crosses the border is checked there, once: ``records`` lets in no NaN, infinity or invalid text, ``ipc`` believes
nothing that a stream says of itself. Everything above relies on it and checks nothing again.

Comes in: rows, columns and streams of callers. Goes out: validated batches in stored form, and the same back. May not
touch: tables as a whole, files, threads, and any room above ``model``. Begin reading at ``columns``.
"""
