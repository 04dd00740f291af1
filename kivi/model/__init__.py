"""Tables, queries and subscriptions as a user declares them, in plain data.

    types             column types, and single values between the caller's form and stored form
    schema            what a table is: columns, operators, the three kinds of table
    declarations      what a caller declares, made into schemas: every rule of what may be declared
    derived_columns   arithmetic over an aggregate's columns
    expressions       predicates and values over columns: what they mean, and on single rows
    scans             what a read asks for
    predicate_text    predicates and values as people type them
    changes           what was committed to a table after a timestamp
    subscriptions     what a subscriber asks for, and what it is told
    tenants           readers and writers of some rows, and what keeps them to these
    outcomes          what ``outcome(token)`` answers when there is no commit timestamp to give
    surface           the short names of the public surface

Comes in: what a caller wrote. Goes out: values that are checked, immutable and comparable. May not touch: bytes,
files, threads, clocks, Arrow but for the one call of its RE2 (``expressions.texts``). Begin reading at ``schema``.
"""
