"""The command line: ``kivi``. A client like any other; its offline tools and ``serve`` open a store.

    commands   the arguments of every command, and the small commands
    append     ``kivi append``: events from files
    aggregate  ``kivi aggregate``: an online aggregate, with the progress of its backfill
    shell      ``kivi shell``: transactions by hand
    watch      ``kivi watch``: a query kept up on a terminal
    offline    dump, verify, backup and restore of a store that nobody has open
    folders    directories that are there whole or not at all
    text       text in, text out

Comes in: words that somebody typed. Goes out: text and exit codes. May not touch: the store, but inside the functions
of ``offline`` and ``serve``. Begin reading at ``commands``.
"""

from __future__ import annotations

from kivi.cli.commands import main

__all__ = ["main"]
