"""The hub of ``kivi_server.process.hub``, in its own process: a follower of the store, and a server over it.

Its standard input is one line that says what to serve, and ends with the server that started it. Its standard output is
what a server says, and each second a line of figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from kivi_server.metrics import Stats
from kivi_server.options import Options
from kivi_server.process import serve
from kivi_server.process.hub import SAID

from kivi.errors import KiviError
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.following import open_follower

__all__ = ["main"]


def main() -> int:
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    options = Options(**{**told["options"], "settings": Settings.of(told["options"]["settings"])})
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def opened(options: Options, stack: contextlib.ExitStack) -> tuple[Store, Callable[[Options], None]]:
        follower = open_follower(options.data, told["log"], options.settings)
        stack.callback(follower.close)
        return follower.store, lambda options: None

    def said(stats: Stats) -> None:
        found = stats()
        print(json.dumps({name: found[name] for name in SAID} | {"hub_watermark": found["watermark"]}), flush=True)

    try:
        return serve.run(options, opened, said)
    except KiviError as error:
        print(f"kivi hub: {error.message}", file=sys.stderr)
        return 1


def _end_with_parent() -> None:
    """Nothing more is said here: the server has ended, perhaps without a word."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
