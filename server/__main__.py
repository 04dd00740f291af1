"""``python -m kivi_server``: the same as ``kivi serve``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kivi_server.options import add_arguments, options_of, printed

from kivi.errors import KiviError
from kivi.runtime.imports import uncollected

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kivi_server", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    try:
        arguments = parser.parse_args(argv)
        options = options_of(arguments)
        if arguments.print_settings:
            print(printed(options))
            return 0
        with uncollected():
            from kivi_server.process.serve import run
        return run(options)
    except KiviError as error:
        print(f"kivi_server: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
