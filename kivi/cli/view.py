"""``kivi view NAME SOURCE --key COLUMN,...``: creates a secondary view of a row table.

::

    kivi view accounts_by_name accounts --key name,id
    kivi view accounts_by_email accounts --key email --unique --columns name

The rows that are there already are in it when the command returns, while writers go on.
"""

from __future__ import annotations

import argparse
from typing import Any

from kivi.cli.text import print_value

__all__ = ["view"]


def view(db: Any, args: argparse.Namespace) -> None:
    """Creates it on ``db``."""
    columns = None if args.columns is None else _names(args.columns)
    db.create_view(args.name, args.source, _names(args.key), columns, args.unique)
    print_value({"view": args.name, "source": args.source}, args.output)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
