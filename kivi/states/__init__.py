"""The states of measures: what is kept of many observations, how it is combined, and what is read from it.

A measure is (state, combine, evaluate). Its state is a bag of *items*, rows of a few columns (a bucket and a count; a
register and a rank; a time and a value), and

::

    combine(a, b)  =  reduce(a + b)                  + puts two bags together
    reduce(reduce(a) + reduce(b))  =  reduce(a + b)  whatever a and b are, and in any order
    reduce(a) is one bag for all bags that mean the same, so equal states are equal bytes

So batching, order, consolidation, rollup and a crash change no bit of a state (R20). The two exceptions are sums of
floats, which are added in commit order (R10), and say so: ``Kind.ordered``.

Thousands of states are one *ragged* column: items of all of them in arrays, and where each begins. Each kind reduces,
encodes, decodes and evaluates whole columns by NumPy kernels. The forms::

    events --of_events--> items in a delta run --reduce--> items --encode--> bytes in a base row --values--> value

::

    kinds       Kind, the contract; Items                    registry   which kind a column has
    quantiles   exact counts in log-spaced buckets           distinct   HyperLogLog registers
    moments     avg, var, stddev                             winners    first, last, argmax, argmin, largest, smallest
    top         the most frequent values                     own        registered measures

Comes in: columns of events, states. Goes out: states, values in stored form. May not touch: I/O, clocks, threads, keys,
tables. Begin reading at ``kinds``.
"""
