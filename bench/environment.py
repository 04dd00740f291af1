"""The environment of the peers that come from PyPI: ``bench/.venv``, made when it is first needed.

None of them is a dependency of kivi, of its tests or of its other tasks, and an environment of their own keeps it so.
What belongs into it is the extra ``bench`` of pyproject.toml; the versions are those of constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["CannotInstall", "python"]

ROOT: Final = Path(__file__).resolve().parent.parent
_HOME: Final = ROOT / "bench" / ".venv"


class CannotInstall(Exception):
    """The environment could not be made; the message is the end of what pip said."""


@cache
def python() -> str:
    """The environment's interpreter; makes and fills the environment if that has to be. Raises CannotInstall."""
    found = _HOME / "bin" / "python"
    stamp = _HOME / ".installed"
    content = "".join((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))
    if not stamp.exists() or stamp.read_text() != content:
        print(f"kivi: installing the peers from PyPI into {_HOME.relative_to(ROOT)} (about 1.1 GB)", flush=True)
        if not found.exists():
            _run([sys.executable, "-m", "venv", str(_HOME)])
        _run([str(found), str(ROOT / "tools" / "install.py"), "--only", "bench"])
        stamp.write_text(content)
    return str(found)


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise CannotInstall(" | ".join(said[-3:]) or f"{command[0]} failed")
