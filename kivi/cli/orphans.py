"""``kivi orphans``: objects of cold tiers that no store and no backup among some directories names. Deletes nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from kivi.cli.offline import checked, copy_opened
from kivi.errors import NotAStore

__all__ = ["orphans"]


def orphans(args: argparse.Namespace) -> int:
    """A line for each: its URL, and for which copy it is pinned, if it is."""
    from kivi.store import backups
    from kivi.store.orphans import named_by, orphans

    named: dict[str, set[str]] = {}
    for given in args.dirs:
        found = [given]
        with contextlib.suppress(NotAStore):
            found = backups.of_repository(given)
        for path in found:
            with copy_opened(checked(path)) as store:
                for url, keys in named_by(store).items():
                    named[url] = named.get(url, set()) | keys
    for url, copy in orphans(named):
        if args.output == "json":
            print(json.dumps({"object": url, "pinned_for": copy}))
        elif copy is None:
            print(url)
        else:
            print(f"{url}  pinned for {copy}" + ("" if Path(copy).exists() else ", which is not there"))
    return 0
