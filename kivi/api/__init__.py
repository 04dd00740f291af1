"""The public interface, and what every database behind it shares.

    interface      ``Database``, ``Transaction`` and ``Snapshot``, as they are for threads
    arguments      what callers write, checked once for all databases
    writes         writes of rows, checked against a schema, in stored form
    appender       events one at a time, committed together
    gathering      what the appenders of threads and of tasks share
    subscription   subscriptions as callers have them
    tokens         request tokens: made, and when they were made
    retry          how long to pause before the same is tried again

Comes in: what a caller wrote. Goes out: arguments in stored form, for ``embedded``, ``client`` or ``aio`` to carry out.
May not touch: any database. Begin reading at ``interface``.
"""
