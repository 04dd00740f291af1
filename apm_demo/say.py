"""What the person sees: lines, and progress of what takes long.

On a terminal progress is a bar that moves (rich). Elsewhere it is a plain line every few seconds, so that a log of
continuous integration shows that something happens, and what.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Bar", "Voice"]

_PLAIN_EVERY_S: Final = 5.0


class Bar(Protocol):
    """One piece of work under way."""

    def at(self, done: float, note: str = "") -> None:
        """``done`` of the total is behind us."""


class Voice:
    """Speaks on stdout, in rich's way on a terminal and in plain lines elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self._console = Console(highlight=False) if self.terminal else None
        self._started = time.monotonic()

    def line(self, text: str = "", style: str = "") -> None:
        if self._console is not None:
            self._console.print(text, style=style or None, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def step(self, text: str) -> None:
        """What happens next, with the time since the start."""
        self.line(f"[{time.monotonic() - self._started:5.1f} s] {text}", "bold")

    def note(self, text: str) -> None:
        self.line(f"          {text}")

    def proved(self, text: str) -> None:
        self.line(f"  proved: {text}", "green")

    def wrong(self, text: str) -> None:
        self.line(f"  WRONG:  {text}", "bold red")

    @contextlib.contextmanager
    def bar(self, what: str, total: float) -> Iterator[Bar]:
        if self._console is None:
            bar = _Plain(self, what, total)
            yield bar
            bar.end()
            return
        columns = (TextColumn("          {task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            yield _Rich(progress, what, total)


class _Rich:
    def __init__(self, progress: Progress, what: str, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="")

    def at(self, done: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)


class _Plain:
    def __init__(self, voice: Voice, what: str, total: float) -> None:
        self._voice, self._what, self._total = voice, what, total
        self._said, self._last, self._note = time.monotonic(), "", ""

    def at(self, done: float, note: str = "") -> None:
        percent = 100 * min(1.0, done / self._total) if self._total else 100.0
        self._note = f"{self._what}: {percent:3.0f} %{', ' if note else ''}{note}"
        if time.monotonic() - self._said >= _PLAIN_EVERY_S:
            self.end()

    def end(self) -> None:
        if self._note != self._last:
            self._said, self._last = time.monotonic(), self._note
            self._voice.note(self._note)
