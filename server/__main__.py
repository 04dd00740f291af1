"""``python -m kivi_server``: the same as ``kivi serve``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kivi_server.options import add_arguments, options_of
from kivi_server.serve import run

from kivi.errors import KiviError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kivi_server", description=__doc__)
    add_arguments(parser)
    try:
        return run(options_of(parser.parse_args(argv)))
    except KiviError as error:
        print(f"kivi_server: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
