"""Live queries: what subscribers see, kept up as commits come, beside the commit path.

::

    commits -> pending -> feed          mvcc: a reference to each commit that was applied, in no order
                           |
    watermark moved --> tick            hub: one thread; a snapshot at W, and the commits in (last W, W]
                           |
                      matching          which of the changed rows which queries select, by columns, not one by one
                           |
                       windows          what each query shows at W, once for all who ask for it; nothing is sent yet
                           |
    a subscriber is ready, its interval is over --> the difference between what it has and its window

**Invariants.**

* After a tick at W every current window is what its query gives at the snapshot W (``hub``): rows that changed in
  (last W, W] are exactly those that the feed names, and of them those in anybody's key range (``covering``) are read
  at W. What cannot be known from them (rows beyond a limit, an overwritten table, a feed that ran over, a retention
  floor that moved) is read again beside the ticks (``renewals``), and is not current until one takes it over.
* An update says what its rows are, a definition of the table and columns of it, as the snapshot has them that they were
  read at (``Update.shown``, decision 0104): rows are shown by that, whatever the table was altered to meanwhile.
* A subscriber that is slow costs the state it has, nothing else: differences are made when it is ready for them, from
  one real state to another (``kivi.model.subscriptions``), once for all who have the same state (``shared``). So
  nothing is queued and nothing waits.
* The result and the first change come from one watermark: a window is read at a snapshot while the hub notes which
  rows change meanwhile; these are read again as it is taken over. To look at a row twice is harmless.
* Commits do not wait: they leave a reference in the feed, and lose it there if nobody takes it in time.

    hub            ``Hub``: the thread, its ticks, and whom it tells what
    lives          one subscription; ``schedule`` says when to look at whom
    shared         one query and its window, for all subscriptions to it
    groups         the queries of one table, and what a tick does to them
    matching       which changed rows which queries select; ``covering``: which keys anybody wants
    changed        changed rows as they are at a snapshot
    windows        what a query shows; ``reading`` fills it from a snapshot, ``renewals`` once more
    rollups        subscriptions to rollups; ``partials``: what their rows are made of
    tails          events for those who are behind, from the table
    durable        subscriptions that outlive their connection; ``connections``: which one has them
    index          these by what they ask for: whom an event reaches; ``cells``: where a predicate stands there
    host           what all of this uses of the store

Comes in: queries, and the commits of the feed. Goes out: updates, to whoever asked. May not touch: whoever commits.
Begin reading at ``hub``.
"""
