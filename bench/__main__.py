"""``python -m bench goal1 ... goal20``, or ``all``: measures, verifies, prints, and writes a results file."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import machine, results
from bench.context import PEERS, Context
from bench.verify import WrongTotals

_GOALS: Final = {
    "goal1": "stream",
    "goal2": "producers",
    "goal3": "small",
    "goal4": "reading",
    "goal5": "factors",
    "goal6": "volume",
    "goal7": "sparking",
    "goal8": "sizing",
    "goal9": "live",
    "goal10": "measures",
    "goal11": "lifetimes",
    "goal12": "views",
    "goal13": "history",
    "goal14": "hours",
    "goal15": "nodes",
    "goal16": "patterns",
    "goal17": "scale",
    "goal18": "topics",
    "goal19": "freshness",
    "goal20": "front",
}
_HOME: Final = Path(__file__).resolve().parent


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measurements: see bench/__init__.py.")
    parser.add_argument("goal", nargs="+", choices=[*_GOALS, "all", "page"], help="page: only make RESULTS.md anew")
    parser.add_argument("--runs", type=int, help="how often everything is measured (default 3; with --quick 1)")
    parser.add_argument("--seconds", type=float, help="how long each rate is measured (default 5; with --quick 0.5)")
    parser.add_argument("--quick", action="store_true", help="briefly: totals are verified, figures mean nothing")
    parser.add_argument("--peers", default="all", help=f"all, none, or some of {','.join(PEERS)} (default all)")
    parser.add_argument(
        "--events",
        type=int,
        help="of goal 6, and half of them of goal 11; goal 16 has no more, goal 18 stores no more subscriptions "
        "(default 200,000,000; with --quick 2,000,000)",
    )
    parser.add_argument("--operations", type=int, default=160_000, help="of each case of goal 18 (default 160,000)")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on a real disk (%(default)s)")
    return parser.parse_args(arguments)


def _peers(text: str) -> frozenset[str]:
    named = {"all": set(PEERS), "none": set[str]()}.get(text, set(text.split(",")))
    if unknown := named - set(PEERS):
        raise SystemExit(f"kivi: there is no peer {sorted(unknown)[0]!r}; there are {', '.join(PEERS)}")
    return frozenset(named)


def _measure(goal: str, context: Context) -> None:
    module = importlib.import_module(f"bench.{_GOALS[goal]}")
    sheet, began = module.sheet(), time.monotonic()
    about = machine.describe(context.disk)
    if about["filesystem"] == "tmpfs":
        raise SystemExit(f"kivi: {context.disk} is in memory, where a sync costs nothing; name a disk: --disk DIR")
    print(f"kivi: {goal}: {sheet.title}", flush=True)
    for run in range(context.runs):
        print(f"run {run + 1} of {context.runs}", flush=True)
        sheet.begin()
        module.take(context, sheet)
    result = results.raw(sheet, about, context.settings)
    path = results.write(context.results, result)
    print(f"\n{results.shown(result)}\nkivi: {goal} took {time.monotonic() - began:.0f} s; raw results: {path}\n")


def main(arguments: Sequence[str]) -> int:
    args = _arguments(arguments)
    quick: bool = args.quick
    context = Context(
        quick=quick,
        runs=args.runs or (1 if quick else 3),
        seconds=args.seconds or (0.5 if quick else 5.0),
        peers=_peers(args.peers),
        disk=args.disk,
        events=args.events or (2_000_000 if quick else 200_000_000),
        operations=args.operations,
        results=_HOME / "results" / "quick" / "results" if quick else _HOME / "results",
    )
    if args.goal == ["page"]:
        (context.results.parent / "RESULTS.md").write_text(results.page(context.results))
        return 0
    goals = list(_GOALS if "all" in args.goal else dict.fromkeys(args.goal))
    if len(goals) > 1:  # each in a process of its own, so that none inherits another's threads, memory or event loop
        options = [argument for argument in arguments if argument not in args.goal]
        return max([subprocess.call([sys.executable, "-m", "bench", goal, *options]) for goal in goals])
    try:
        _measure(goals[0], context)
    except WrongTotals as error:
        print(f"kivi: {goals[0]}: wrong totals, so no figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
