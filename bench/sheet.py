"""A goal's figures: run by run, then medians, spreads and ratios.

A figure belongs to a system and a case: ("kivi", "wide, 10,000"). A ratio is formed within each run, and only then
are runs summed up, by the median and the least and greatest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figures", "Ratio", "Sheet", "Spread", "best", "number", "percentile"]

Figures = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over runs."""

    median: float
    least: float
    greatest: float
    runs: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    """``value`` takes one run's figures; a KeyError means that something of it was not measured."""

    text: str
    value: Callable[[Figures], float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        if self.at_least is not None:
            return f"at least {number(self.at_least)}"
        return f"at most {number(self.at_most)}" if self.at_most is not None else ""

    def reached(self, median: float) -> bool | None:
        if self.at_least is not None:
            return median >= self.at_least
        return median <= self.at_most if self.at_most is not None else None


@dataclass
class Sheet:
    """What a goal measured. ``details`` take whatever explains a figure; they land in the raw results."""

    goal: str
    title: str
    ratios: list[Ratio]
    runs: list[dict[tuple[str, str], float]] = field(default_factory=list)
    units: dict[tuple[str, str], str] = field(default_factory=dict)
    details: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # peer -> why it was not measured
    versions: dict[str, str] = field(default_factory=dict)  # peer -> its version and settings
    series: list[dict[str, dict[str, list[float]]]] = field(default_factory=list)  # of each run: what is plotted

    def begin(self) -> None:
        self.runs.append({})
        self.details.append({})
        self.series.append({})

    def record(self, system: str, case: str, value: float, unit: str, **details: Any) -> None:
        """A figure of the current run; printed at once."""
        self.runs[-1][system, case] = value
        self.units[system, case] = unit
        if details:
            self.details[-1][f"{system}: {case}"] = details
        print(f"  {system:<12} {case:<44} {number(value):>12} {unit}", flush=True)

    def skip(self, peer: str, reason: str) -> None:
        if peer not in self.skipped:
            print(f"  {peer:<12} skipped: {reason}", flush=True)
        self.skipped[peer] = reason

    def figures(self) -> dict[tuple[str, str], Spread]:
        return {key: Spread.of([run[key] for run in self.runs if key in run]) for key in self.units}

    def compared(self) -> list[tuple[Ratio, Spread | None]]:
        """Each ratio over the runs that have all of it; None if none has."""
        return [(ratio, _over(ratio, self.runs)) for ratio in self.ratios]


def _over(ratio: Ratio, runs: list[dict[tuple[str, str], float]]) -> Spread | None:
    values = []
    for run in runs:
        try:
            values.append(ratio.value(run))
        except KeyError:
            continue
    return Spread.of(values) if values else None


def best(figures: Figures, system: str, *cases: str) -> float:
    """The greatest of these cases that was measured; KeyError if none was."""
    found = [figures[system, case] for case in cases if (system, case) in figures]
    if not found:
        raise KeyError((system, cases))
    return max(found)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def number(value: float | None) -> str:
    """Three digits that matter, thousands set apart: 1,234,567 and 12.3 and 0.0123."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
