"""The long form: every checker again and again until the time is up, and a report. ``make soak MINUTES=10``.

The time is shared: a tenth for the model's seeded histories (in memory and on disk), three tenths for each of the
concurrent checkers (one run, steady, then one with kills), the rest for crashes at points and power losses in turn.
A checker that was not run often enough to mean anything is reported as *not run*, which fails the soak like a failure.

What it proves: with no failure in N independent cycles, the rate of failures is below 3/N with 95 % confidence.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.mvcc.test_model import scheduled
from tests.proof.concurrent import checked
from tests.proof.crash import NotReachedError, crash_at, power_lost, prepare
from tests.proof.points import POINTS
from tests.proof.powerloss import library

__all__ = ["soak"]

MINIMA = {"commits": 20_000, "reads": 5_000, "consolidations": 1_000, "aborts": 200}
"""Of a concurrent run; a shorter soak than about 15 minutes will not reach them, and says so."""

RARE = {"segment rolled", "log truncated", "flushed", "swept", "backfill done", "checkpoint copied", "checkpoint begun"}


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


def soak(minutes: float, seed: int, where: Path, say: Callable[[str], None] = print) -> tuple[str, bool]:
    """The report in Markdown, and whether everything passed."""
    rng = random.Random(seed)
    began = time.monotonic()
    budget = minutes * 60
    parts: list[Part] = []

    def cycle(part: Part, run: Callable[[], Counter[str]], what: str) -> None:
        started = time.monotonic()
        try:
            part.counted += run()
        except NotReachedError as error:
            say(str(error))
            return
        except Exception:
            part.failures.append(f"{what}\n{traceback.format_exc()}")
            say(f"FAILED  {part.name}: {what}")
        part.cycles += 1
        part.seconds += time.monotonic() - started

    for kind in ("memory", "disk"):
        part = Part(f"model, {kind}", least=20)
        parts.append(part)
        until = time.monotonic() + budget * 0.05
        while time.monotonic() < until:
            number = rng.randrange(10**9)
            path = where / f"model {number}" if kind == "disk" else None
            cycle(part, lambda n=number, p=path: scheduled(n, path=p), f"seed {number}")  # type: ignore[misc]
        say(part.line())

    for kill_every_s in (None, 5.0):
        part = Part("concurrent, " + ("steady" if kill_every_s is None else "killed every 5 s"))
        parts.append(part)
        number = rng.randrange(10**6)

        def concurrent(
            part: Part = part, number: int = number, kill_every_s: float | None = kill_every_s
        ) -> Counter[str]:
            result = checked(
                where / f"concurrent {number}",
                minima=MINIMA,
                seconds_max=budget * 0.3,
                seed=number,
                kill_every_s=kill_every_s,
            )
            if result.short:
                part.least = 2
                say(f"not run: {part.name}: {dict(result.short)}")
            return Counter(result.counted)

        cycle(part, concurrent, f"seed {number}")
        say(part.line())

    history = prepare(where / "history")
    shim = library(where)
    crashes, losses = Part("crash at a named point", least=2 * len(POINTS)), Part("power loss", least=100)
    parts += [crashes, losses]
    points: list[str] = []
    while time.monotonic() < began + budget:
        points = points or rng.sample(sorted(POINTS), len(POINTS))
        point, number = points.pop(), rng.randrange(10**6)
        nth = rng.randint(1, 3 if point in RARE else 60)
        place = where / f"crash {number}"

        def crash(point: str = point, nth: int = nth, place: Path = place, number: int = number) -> Counter[str]:
            crashed = crash_at(point, nth, history, place, seed=number)
            return Counter({"commits": crashed.commits, "unknown": crashed.unknown, "checkpoints": crashed.checkpoints})

        place.mkdir()
        cycle(crashes, crash, f"{point} {nth}, seed {number}")
        if crashes.cycles % 4 == 0 and shim is not None:
            place = where / f"power {number}"
            place.mkdir()
            started = time.monotonic()
            try:
                for crashed in power_lost(shim, history, place, seed=number, commits=rng.randint(10, 500), states=20):
                    losses.cycles += 1
                    losses.counted += Counter({"commits": crashed.commits})
            except Exception:
                losses.failures.append(f"seed {number}\n{traceback.format_exc()}")
                say(f"FAILED  power loss: seed {number}")
            losses.seconds += time.monotonic() - started
    for part in (crashes, losses):
        say(part.line())

    head = "| checker | verdict | cycles | failures at most, 95 % | s | counted |\n|---|---|---|---|---|---|"
    failures = "\n".join(f"\n## {part.name}\n\n```\n{text}```" for part in parts for text in part.failures)
    report = (
        f"# Soak of {minutes:g} minutes, seed {seed}\n\n{head}\n" + "\n".join(p.line() for p in parts) + failures + "\n"
    )
    return report, all(part.verdict == "passed" for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="rerun: the same histories, in the same order")
    parser.add_argument("--report", type=Path, default=Path("soak-report.md"))
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    with tempfile.TemporaryDirectory(prefix="kivi-soak-") as where:
        report, good = soak(options.minutes, seed, Path(where))
    options.report.write_text(report, encoding="utf-8")
    print(f"\n{report}\nwritten to {options.report}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
