"""Results files: every figure of every run as JSON, and one page that people read.

The raw file of a goal is named by goal and time; the page is made anew from the newest raw file of each goal, so it
can always be made again.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench import environment
from bench.sheet import Sheet, Spread, number

__all__ = ["page", "raw", "shown", "write"]


def raw(sheet: Sheet, machine: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything of a goal, as plain data."""
    return {
        "goal": sheet.goal,
        "title": sheet.title,
        "machine": machine,
        "settings": settings,
        "skipped": sheet.skipped,
        "peers": sheet.versions,
        "figures": [
            {"system": system, "case": case, "unit": sheet.units[system, case], **_plain(spread)}
            for (system, case), spread in sheet.figures().items()
        ],
        "ratios": [
            {
                "text": ratio.text,
                "wanted": ratio.wanted,
                "reached": spread and ratio.reached(spread.median),
                **_plain(spread),
            }
            for ratio, spread in sheet.compared()
        ],
        "runs": [
            [
                {"system": system, "case": case, "value": value, **details.get(f"{system}: {case}", {})}
                for (system, case), value in run.items()
            ]
            for run, details in zip(sheet.runs, sheet.details, strict=True)
        ],
        "series": sheet.series,
        "plot": None,
    }


def write(directory: Path, result: dict[str, Any]) -> Path:
    """Writes the raw file and makes the page (``RESULTS.md`` beside the directory) anew; the raw file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = result["machine"]["at"].replace(":", "").replace("+0000", "Z")
    path = directory / f"{result['goal']}-{stamp}.json"
    if any(result["series"]):
        result["plot"] = _plotted(result, path.with_suffix(".png"))
    path.write_text(json.dumps(result, indent=1) + "\n")
    (directory.parent / "RESULTS.md").write_text(page(directory))
    return path


def page(directory: Path) -> str:
    """The newest result of each goal, readable."""
    newest: dict[str, Path] = {}
    for path in sorted(directory.glob("goal*.json")):
        newest[path.name.partition("-")[0]] = path
    parts = [
        "# Results\n",
        "Made by `make bench` from the newest file of each goal in `results/`. What is measured, and what a number "
        "means: [the essay](__init__.py). Figures are the median of the runs, with the least and the greatest; "
        "ratios are formed within each run.\n",
    ]
    parts += [
        shown(json.loads(path.read_text()), path.name)
        for _, path in sorted(newest.items(), key=lambda item: int(item[0].removeprefix("goal")))
    ]
    return "\n".join(parts)


def shown(result: dict[str, Any], name: str = "") -> str:
    """One goal in Markdown."""
    machine, settings = result["machine"], result["settings"]
    lines = [f"## {result['goal']}: {result['title']}\n"]
    if settings["quick"]:
        lines.append("**A brief run (`--quick`): it shows that the script works, its figures mean nothing.**\n")
    versions = ", ".join(f"{key} {value}" for key, value in machine["versions"].items())
    lines += [
        f"{machine['at']}, commit {machine['commit']}; {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, {machine['filesystem']}, one sync "
        f"{machine['sync_p50_us']:,} us; load {machine['load_1m']} at the start; {versions}; "
        f"{settings['runs']} runs of {settings['seconds']:g} s a rate" + (f"; raw: `{name}`\n" if name else "\n"),
    ]
    if result["ratios"]:
        lines += ["| ratio | median | spread | wanted | reached |", "|---|---|---|---|---|"]
        for ratio in result["ratios"]:
            reached = {True: "yes", False: "**no**", None: ""}[ratio["reached"]]
            lines.append(f"| {ratio['text']} | {_spread(ratio)} | {ratio['wanted']} | {reached} |")
        lines.append("")
    lines += ["| system | case | median | spread | unit |", "|---|---|---|---|---|"]
    lines += [f"| {f['system']} | {f['case']} | {_spread(f)} | {f['unit']} |" for f in result["figures"]]
    lines.append("")
    lines += [f"{peer}: {version}.\n" for peer, version in result["peers"].items()]
    lines += [f"Not measured: {peer} ({reason}).\n" for peer, reason in result["skipped"].items()]
    if result["plot"]:
        lines.append(f"![{result['goal']} over time](results/{result['plot']})\n")
    return "\n".join(lines)


def _plotted(result: dict[str, Any], path: Path) -> str | None:
    """The name of the plot; without the environment that draws, the page does without."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(result, file)
        file.flush()
        try:
            command = [environment.python(), "-m", "bench.plots", file.name, str(path)]
            subprocess.run(command, check=True, cwd=environment.ROOT)
        except (environment.CannotInstall, subprocess.CalledProcessError) as error:
            print(f"kivi: no plot: {error}", flush=True)
            return None
    return path.name


def _plain(spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {"median": None}
    return {"median": spread.median, "least": spread.least, "greatest": spread.greatest, "runs": spread.runs}


def _spread(entry: dict[str, Any]) -> str:
    if entry["median"] is None:
        return "not measured | "
    if entry["runs"] == 1:
        return f"{number(entry['median'])} | one run"
    return f"{number(entry['median'])} | {number(entry['least'])} to {number(entry['greatest'])}"
