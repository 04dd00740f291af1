"""Row patterns over events: rows in columns go in, one row for each match comes out. What a pattern means is in
``kivi.model.patterns``.

::

    events in any order  --rows-->  partition after partition, each in its total order, and for each row a *class*:
                                    which of the defined symbols it may be
    classes  --automaton, matching-->  matches: from which row up to which, and of which symbol each row is
    matches  --answer-->  one row each, with the measures of its rows

**Invariant.** The match that counts at a row is the preferred one among those that end within ``within``: so each row
has a limit, the first row that is too late, and the automaton reads up to it. It reads each row once per beginning and
never goes back (``automaton``): what a pattern costs is bounded by its rows, whatever the pattern.

**Leaving rows out** (``candidates``). A match has a row of each mandatory symbol, and all of its rows lie within
``within`` of that one. So rows that are further from every candidate of some mandatory symbol, in their partition, are
in no match. Rows that are left on both sides of a gap cannot be taken for neighbours: a match over the gap would have
a candidate, and the gap would be within reach of it. This needs definitions that look at rows of the match alone
(``kivi.model.patterns.sees_inside``); others, and patterns without ``within``, leave out whole partitions.

It does no I/O, and knows neither snapshots nor tables: ``kivi.store.patterns`` reads, and asks here. Begin with
``matching``.
"""
