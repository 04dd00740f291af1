"""The long form: every checker again and again until the time is up, and a report. ``make soak MINUTES=10``.

The time is shared: the model's seeded histories (in memory and on disk) 8 %, concurrent clients 40 % (a steady run,
then one with kills), crashes at named points and power losses 27 %, storage faults and damage 10 %, hostile input the
rest. A checker that was not run often enough to mean anything is reported as *not run*, which fails the soak.

The report says how many of the commits that servers took had entered in groups of two or more; below a half, the strong
checkers have not taken the way that applications take, and the soak fails as *not run*.

``make soak CLUSTER=1`` is of a cluster of real processes instead (``clustered``): one after another is made, suffers
every fault that there is in turn, and is judged; the report says what clients noticed of each fault.

What it proves: with no failure in N independent cycles, the rate of failures is below 3/N with 95 % confidence.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import random
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.mvcc.test_model import scheduled
from tests.proof import faults
from tests.proof.clustered import BOUNDS_S, FAULTS, FULL, Seen, besieged
from tests.proof.concurrent import checked
from tests.proof.crash import Crashed, NotReachedError, call_failed, crash_at, killed_at_rest, power_lost, prepare
from tests.proof.damage import contents, cut, damaged, files_of, flip
from tests.proof.faults import ERRORS, calls_in_all, faulty
from tests.proof.hostile import ASSAULTS, Bystander, make_tables, watched
from tests.proof.points import POINTS
from tests.proof.powerloss import library
from tests.serverproc import ServerProcess

__all__ = ["Soak", "soak"]

MINIMA = {"commits": 20_000, "reads": 5_000, "consolidations": 1_000, "aborts": 200, "grouped": 10_000, "each": 1_000}
"""Of a concurrent run; a shorter soak than about 15 minutes will not reach them, and says so."""

CLUSTER_S = 330.0
"""About as long a cluster is under attack before it is judged: each fault once. The oracle has to remember it all."""
STATES = 20  # of the disk after each power loss
RARE = {
    "segment rolled",
    "log truncated",
    "flushed",
    "settled files deleted",
    "swept",
    "backfill done",
    "checkpoint copied",
    "checkpoint begun",
}


@dataclass
class Part:
    """One checker's line of the report."""

    name: str
    cycles: int = 0
    counted: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    least: int = 1
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.failures:
            return "FAILED"
        return "passed" if self.cycles >= self.least else f"not run ({self.cycles} of {self.least})"

    def line(self) -> str:
        bound = f"< {3 / self.cycles:.2%}" if self.cycles and not self.failures else "-"
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counted.items())
        return f"| {self.name} | {self.verdict} | {self.cycles} | {bound} | {self.seconds:.0f} | {counts} |"


def crash_counts(made: Crashed) -> Counter[str]:
    return Counter(
        {
            "commits": made.commits,
            "unknown": made.unknown,
            "checkpoints": made.checkpoints,
            "entered": made.entered,
            "grouped": made.grouped,
        }
    )


class Soak:
    """One long run. Its methods are the checkers, each with its share of the time in seconds."""

    def __init__(self, seed: int, where: Path, say: Callable[[str], None] = print) -> None:
        self.rng = random.Random(seed)
        self.where = where
        self.say = say
        self.parts: list[Part] = []

    def part(self, name: str, least: int = 1) -> Part:
        self.parts.append(Part(name, least=least))
        return self.parts[-1]

    def cycle(self, part: Part, what: str, run: Callable[[], Counter[str]], cycles: int = 1) -> None:
        """Runs a checker once; ``cycles``: how many independent trials that is."""
        started = time.monotonic()
        try:
            part.counted += run()
            part.cycles += cycles
        except NotReachedError as error:
            self.say(str(error))
        except Exception:
            part.cycles += 1
            part.failures.append(f"{what}\n{traceback.format_exc()}")
            self.say(f"FAILED  {part.name}: {what}")
        part.seconds += time.monotonic() - started

    def place(self, name: str) -> Path:
        """A new directory."""
        path = self.where / f"{name} {self.rng.randrange(10**12)}"
        path.mkdir()
        return path

    def models(self, seconds: float) -> None:
        for kind in ("memory", "disk"):
            part, until = self.part(f"model, {kind}", least=20), time.monotonic() + seconds / 2
            while time.monotonic() < until:
                seed = self.rng.randrange(10**9)
                path = self.place("model") / "store" if kind == "disk" else None
                self.cycle(part, f"seed {seed}", partial(scheduled, seed, path=path))
            self.say(part.line())

    def concurrent(self, seconds: float) -> None:
        for kill_every_s in (None, 5.0):
            part = self.part("concurrent, " + ("steady" if kill_every_s is None else "killed every 5 s"))
            seed = self.rng.randrange(10**6)
            self.cycle(part, f"seed {seed}", partial(self._checked, part, seed, seconds / 2, kill_every_s))
            self.say(part.line())

    def _checked(self, part: Part, seed: int, seconds: float, kill_every_s: float | None) -> Counter[str]:
        place = self.place("concurrent") / "data"
        result = checked(place, minima=MINIMA, seconds_max=seconds, seed=seed, kill_every_s=kill_every_s)
        if result.short:
            part.least = 2
            self.say(f"not run: {part.name}: {dict(result.short)}")
        return Counter(result.counted)

    def crashes(self, seconds: float) -> None:
        """Named points in random order, all of them before one comes again; after every eighth a power loss."""
        history, shim = prepare(self.where / "history"), library(self.where)
        crashes = self.part("crash at a named point", least=2 * len(POINTS))
        calls = self.part("a failing call of log or engine", least=len(POINTS))
        kills = self.part("a kill when every group is acknowledged", least=len(POINTS) // 3)
        losses = self.part("power loss", least=100)
        points: list[str] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            points = points or self.rng.sample(sorted(POINTS), len(POINTS))
            point, seed = points.pop(), self.rng.randrange(10**6)
            nth = self.rng.randint(1, 3 if point in RARE else 60)

            def crash(point: str = point, nth: int = nth, seed: int = seed) -> Counter[str]:
                made = crash_at(point, nth, history, self.place("crash"), seed=seed)
                return crash_counts(made) + Counter({"before it listened": int(not made.listened)})

            def kill(seed: int = seed) -> Counter[str]:
                commits = self.rng.randint(100, 1_000)
                return crash_counts(killed_at_rest(history, self.place("kill"), seed=seed, commits=commits))

            def lose(seed: int = seed) -> Counter[str]:
                assert shim is not None
                commits, at_rest, place = self.rng.randint(10, 500), self.rng.random() < 0.5, self.place("power")
                made = power_lost(shim, history, place, seed=seed, commits=commits, states=STATES, at_rest=at_rest)
                server = Counter({"entered": made[0].entered, "grouped": made[0].grouped})  # of all states, one
                return Counter({"commits": sum(each.commits for each in made)}) + server

            def fail(seed: int = seed) -> Counter[str]:
                assert shim is not None
                number, error = int(10 ** self.rng.uniform(0.5, 3.7)), self.rng.choice((errno.EIO, errno.ENOSPC))
                lasts, place = self.rng.random() < 0.5, self.place("call")
                made = call_failed(shim, history, place, number=number, error=error, lasts=lasts, seed=seed)
                return crash_counts(made)

            self.cycle(crashes, f"{point} {nth}, seed {seed}", crash)
            if crashes.cycles % 2 == 0 and shim is not None:
                self.cycle(calls, f"seed {seed}", fail)
            if crashes.cycles % 4 == 0:
                self.cycle(kills, f"seed {seed}", kill)
            if crashes.cycles % 8 == 0 and shim is not None:
                self.cycle(losses, f"seed {seed}", lose, STATES)
        for part in (crashes, calls, kills, losses):
            self.say(part.line())

    def storage(self, seconds: float) -> None:
        """Calls that fail, every one in turn as far as the time goes; then damage to files that nobody has open."""
        empty = faults.prepare(self.place("calls") / "empty")
        total = calls_in_all(self.place("calls") / "store", empty)
        failing, damage = self.part("storage faults", least=50), self.part("damage", least=50)
        cases = [(n, error, lasts) for n in range(1, total + 1) for error in ERRORS for lasts in (False, True)]
        self.rng.shuffle(cases)
        until = time.monotonic() + seconds / 2
        for number, error, lasts in cases:
            if time.monotonic() > until:
                break
            run = partial(faulty, self.place("fault") / "store", empty, number, error, lasts=lasts)
            self.cycle(failing, f"{error} at call {number}, lasts={lasts}", run)
        whole = prepare(self.where / "whole").path
        expected, names = contents(whole), files_of(whole)
        until = time.monotonic() + seconds / 2
        while time.monotonic() < until:
            seed, name, how = self.rng.randrange(10**9), self.rng.choice(names), self.rng.choice((flip, cut))

            def harm(seed: int = seed, name: Path = name, how: Callable[..., str] = how) -> Counter[str]:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    place = self.place("damage") / "store"
                    return Counter({damaged(whole, expected, name, how, place, random.Random(seed)): 1})

            self.cycle(damage, f"{how.__name__} {name}, seed {seed}", harm)
        for part in (failing, damage):
            self.say(part.line())

    def hostile(self, scale: float) -> None:
        part = self.part("hostile input and overload", least=len(ASSAULTS))
        with ServerProcess(self.place("besieged") / "data", "--http", "localhost:0") as server:
            with server.connect(timeout=60) as db:
                make_tables(db)
            bystander = Bystander(server.endpoint)
            quiet_ms = bystander.quiet_ms()

            def attack(name: str) -> Counter[str]:
                with watched(server, bystander, quiet_ms):
                    ASSAULTS[name](server, scale)
                return Counter({name: 1})

            for name in ASSAULTS:
                self.cycle(part, name, partial(attack, name))
            if bystander.stop() != 0:
                part.failures.append("the well-behaved client got a wrong answer")
        self.say(part.line())

    def clusters(self, seconds: float) -> list[Seen]:
        """Each fault once before one comes again, over all clusters."""
        part, until = self.part("clusters under attack"), time.monotonic() + seconds
        seen: list[Seen] = []
        faults: list[str] = []

        def coming(deadline: float) -> Iterator[str]:
            while time.monotonic() < deadline:
                faults[:] = faults or self.rng.sample([*FAULTS], len(FAULTS))
                yield faults.pop()

        def run(seed: int) -> Counter[str]:
            left = until - time.monotonic()
            ends = time.monotonic() + (left if left < 1.5 * CLUSTER_S else CLUSTER_S)
            made = besieged(self.place("cluster"), coming(ends), seed=seed, say=self.say)
            seen.extend(made.seen)
            return made.counted

        while time.monotonic() < until:
            seed = self.rng.randrange(10**6)
            self.cycle(part, f"seed {seed}", partial(run, seed))
            self.say(part.line())
        return seen

    @property
    def entered(self) -> Counter[str]:
        """Of all commits that servers took: how many ``entered``, and how many of them ``grouped``."""
        by_servers = (part.counted for part in self.parts if "entered" in part.counted)  # the models have none
        return sum(by_servers, Counter[str]())

    @property
    def is_grouped(self) -> bool:
        """Whether at least half of the commits entered in groups of two or more."""
        return 2 * self.entered["grouped"] >= self.entered["entered"] > 0

    @property
    def groups(self) -> str:
        entered, grouped = self.entered["entered"], self.entered["grouped"]
        share = f"{grouped / entered:.0%}" if entered else "none"
        return f"{grouped:,} of {entered:,} commits ({share}) entered in groups of two or more" + (
            "." if self.is_grouped else ": *not run*, it has to be half of them."
        )

    def report(self, head: str, more: str) -> str:
        """In Markdown; ``more`` comes behind the table of checkers."""
        titles = "| checker | verdict | cycles | failures at most, 95 % | s | counted |\n|---|---|---|---|---|---|"
        lines = "\n".join(part.line() for part in self.parts)
        told = "\n".join(f"\n## {part.name}\n\n```\n{text}```" for part in self.parts for text in part.failures)
        return f"# {head}\n\n{titles}\n{lines}\n\n{more}\n{told}\n"


def soak(minutes: float, seed: int, where: Path, say: Callable[[str], None] = print) -> tuple[str, bool]:
    """The report, and whether everything passed.

    The concurrent checkers end when their minima are reached: what they leave of their time, crashes get.
    """
    run, seconds, began = Soak(seed, where, say), minutes * 60, time.monotonic()
    run.models(0.08 * seconds)
    run.concurrent(0.4 * seconds)
    run.crashes(max(0.15 * seconds, began + 0.65 * seconds - time.monotonic()))
    run.storage(0.1 * seconds)
    run.hostile(min(1.0, minutes / 30))
    good = run.is_grouped and all(part.verdict == "passed" for part in run.parts)
    return run.report(f"Soak of {minutes:g} minutes, seed {seed}", run.groups), good


def noticed(seen: Sequence[Seen]) -> str:
    """What clients noticed of each kind of fault, in Markdown."""
    lines = [
        "| fault | seen | lasted, s | no commit of a client for, s: median, longest | bound | late | calls failed | "
        "a read that spans nodes took, s: longest | all nodes up to date after, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, bound_s in BOUNDS_S.items():
        of = [one for one in seen if one.fault == name]
        if not of:
            left = ": needs root, for a file system of its own" if name in FULL and os.getuid() != 0 else ""
            lines.append(f"| {name} | *not run*{left} | | | | | | | |")
            continue
        gaps = sorted(one.gap_s for one in of)
        bound = "as long as it lasts" if bound_s is None else f"{bound_s:g}"
        lines.append(
            f"| {name} | {len(of)} | {min(one.lasted_s for one in of):.0f} to {max(one.lasted_s for one in of):.0f} | "
            f"{statistics.median(gaps):.1f}, {gaps[-1]:.1f} | {bound} | {sum(one.is_late for one in of)} | "
            f"{sum(one.failed for one in of)} | {max(one.span_s for one in of):.1f} | "
            f"{max(one.back_s for one in of):.1f} |"
        )
    return "\n".join(lines)


def cluster_soak(minutes: float, seed: int, where: Path, say: Callable[[str], None] = print) -> tuple[str, bool]:
    """The report, and whether everything passed; with a fault that was never seen it has not."""
    run = Soak(seed, where, say)
    seen = run.clusters(minutes * 60)
    good = all(part.verdict == "passed" for part in run.parts) and {one.fault for one in seen} == set(FAULTS)
    return run.report(f"Soak of a cluster, {minutes:g} minutes, seed {seed}", noticed(seen)), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="rerun: the same histories, in the same order")
    parser.add_argument("--report", type=Path, default=Path("soak-report.md"))
    parser.add_argument("--cluster", action="store_true", help="of a cluster of real processes")
    options = parser.parse_args()
    run = cluster_soak if options.cluster else soak
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    with tempfile.TemporaryDirectory(prefix="kivi-soak-") as where:
        report, good = run(options.minutes, seed, Path(where))
    options.report.write_text(report, encoding="utf-8")
    print(f"\n{report}\nwritten to {options.report}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
