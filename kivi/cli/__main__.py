"""``python -m kivi.cli``: the same as ``kivi``."""

from kivi.cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
