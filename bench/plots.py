"""Plots of what goals measured over time: ``python -m bench.plots RESULT.json PLOT.png``, in the peers' environment.

A column a run; what is wanted is a dashed line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["draw"]

_WIDTH_IN: Final = 4.5  # of a column
_WIDTH_MIN_IN: Final = 10.0
_HEIGHT_IN: Final = 2.6
_ROWS: Final = {"goal6": 3, "goal11": 1, "goal19": 3}


def draw(result: dict[str, Any], path: Path) -> None:
    """One picture of all runs of a goal that has series."""
    columns = [(i + 1, name, series) for i, run in enumerate(result["series"]) for name, series in run.items()]
    rows = _ROWS.get(result["goal"], 2)
    size = (max(_WIDTH_IN * len(columns), _WIDTH_MIN_IN), _HEIGHT_IN * rows + 0.6)
    figure, axes = plt.subplots(rows, len(columns), figsize=size, squeeze=False, sharex="col", sharey="row")
    for column, (run, name, series) in enumerate(columns):
        own = axes[:, column]
        own[0].set_title(f"run {run}: {name}")
        if "second" not in series:
            _disk(own[0], series)
        else:
            _throughput(own[0], series)
            _volume(own[1], own[2], series) if result["goal"] == "goal6" else _latency(own[1], series)
            if result["goal"] == "goal19":
                _ages(own[2], series)
        own[-1].set_xlabel("seconds")
    figure.suptitle(f"{result['goal']}: {result['title']} ({result['machine']['at']})")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def _throughput(axis: Any, series: dict[str, list[float]]) -> None:
    axis.bar(series["second"], [events / 1e6 for events in series["events"]], width=0.9, align="edge", color="tab:blue")
    axis.set_ylabel("appended,\nM events/s")
    axis.set_ylim(bottom=0)


def _latency(axis: Any, series: dict[str, list[float]]) -> None:
    for name in sorted(name for name in series if name.endswith("_ms")):
        axis.plot(series["second"], series[name], label=name.removesuffix("_ms").replace("_", ", "))
    axis.axhline(10, linestyle="--", color="grey", linewidth=1)
    axis.set_yscale("log")
    axis.set_ylabel("ms in each second")
    axis.legend(loc="upper right")


def _ages(axis: Any, series: dict[str, list[float]]) -> None:
    for name in sorted(name for name in series if name.endswith("_old_s")):
        axis.plot(series["second"], series[name], label=name.removesuffix("_old_s"))
    axis.set_ylabel("oldest answer in\neach second, s")
    axis.legend(loc="upper right")


def _volume(memory: Any, disk: Any, series: dict[str, list[float]]) -> None:
    at = [moment - series["at_s"][0] for moment in series["at_s"]]
    memory.plot(at, series["rss_gib"], color="tab:purple")
    memory.axhline(1.5, linestyle="--", color="grey", linewidth=1)
    memory.set_ylabel("memory of the\nserver, GiB")
    memory.set_ylim(bottom=0)
    _disk(disk, series)


def _disk(axis: Any, series: dict[str, list[float]]) -> None:
    at = [moment - series["at_s"][0] for moment in series["at_s"]]
    axis.plot(at, series["disk_gib"], color="tab:brown")
    axis.set_ylabel("on disk, GiB")
    axis.set_ylim(bottom=0)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
