"""``python -m apm_demo``, which is what ``make demo`` and ``make cluster-demo`` run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apm_demo.cluster import ClusterDemo
from apm_demo.demo import Demo, Options, run
from apm_demo.say import Voice


def main() -> int:
    voice = Voice()
    parser = argparse.ArgumentParser(
        prog="python -m apm_demo",
        description="A server, its console, Spark, and the proof that every sum is right. Exit code 0: all is proved.",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("demo-data"), metavar="DIR", help="cleaned first; default demo-data"
    )
    parser.add_argument("--seconds", type=float, help="of live traffic; default 36, and 60 with --cluster")
    parser.add_argument("--port", type=int, default=0, help="of the console, on loopback; default: any that is free")
    parser.add_argument(
        "--serve",
        action=argparse.BooleanOptionalAction,
        default=voice.terminal,
        help="keep the server until Ctrl-C when all is proved; default: on a terminal only",
    )
    parser.add_argument(
        "--cluster", action="store_true", help="three nodes, of which one is killed, and a server of their log"
    )
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = 60.0 if args.cluster else 36.0
    if not 15 <= args.seconds <= 3_600:
        parser.error("--seconds is from 15 to 3600: the rule needs a few slots of 5 s")
    return run(Options(args.data, args.seconds, args.serve, args.port), voice, ClusterDemo if args.cluster else Demo)


if __name__ == "__main__":
    sys.exit(main())
