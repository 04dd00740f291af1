"""The live part of the demonstration beside a server that runs elsewhere: ``python -m apm_demo.live``.

Makes the tables where they are missing, then runs the web service and its callers until it is told to end. The
Spark job that brings the landed files in is a program of its own (``python -m apm_demo.jobs live``), on this machine or
another that sees the same folder. Says ``ready`` once the tables are there.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import kivi
from apm_demo import tables
from apm_demo.children import Child, Failure, end_with_parent
from apm_demo.endpoints import ENDPOINTS

__all__ = ["main"]

_ROUND_S: Final = 120.0  # in each the operator drops the search index once, and builds it again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="localhost:7420", help="of the kivi server; default %(default)s")
    parser.add_argument("--landing", type=Path, required=True, metavar="DIR", help="where events land")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    end_with_parent()
    try:
        with contextlib.ExitStack() as stack:
            _run(args, stop, stack)
    except (Failure, kivi.KiviError, OSError) as error:
        print(f"apm_demo: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, stop: threading.Event, stack: contextlib.ExitStack) -> None:
    with kivi.connect(args.endpoint) as db:
        if "invocations" not in db.tables():
            tables.create(db)
            tables.create_rules(db)
            with db.transaction() as tx:
                for each in ENDPOINTS:
                    tx.put("endpoints", (each.endpoint_id,), **tables.described(each))
    args.landing.mkdir(parents=True, exist_ok=True)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apm_demo-")))

    def start(name: str, *arguments: str) -> Child:
        child = Child(name, logs / name, f"apm_demo.{name}", *arguments)
        stack.callback(child.stop)
        return child

    service = start("service", "--land", str(args.landing))
    ports = service.wait_for("ready", 60)
    print("ready", flush=True)
    while not stop.is_set():
        load = start("load", "--ports", ports, "--seconds", str(_ROUND_S))
        while load.exit_code is None and not stop.wait(0.5):
            service.check()
        load.stop()


if __name__ == "__main__":
    sys.exit(main())
