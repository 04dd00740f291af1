"""The mutation gate: each planted bug is a patch, and the checker that it names must turn red on it.

``python -m tests.proof.mutate [NAME...]`` copies what git tracks to a scratch directory and, for each patch in
``mutants/``, applies it there and runs its checker. A checker that is red without the bug, or green with it, fails the
gate. Prints which checker caught which bug, and how long it took.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "gate", "mutants"]

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).with_name("mutants")
SECONDS_MAX = 400


@dataclass(frozen=True)
class Mutant:
    """A patch, what is wrong with it, and the tests that must notice."""

    name: str
    why: str
    checker: str
    patch: Path


def mutants() -> list[Mutant]:
    """All of them, by name. Their patches begin with a sentence and a line that names the checker."""
    out = []
    for path in sorted(PATCHES.glob("*.patch")):
        text = path.read_text(encoding="utf-8")
        found = re.search(r"^Checker: (.+)$", text, re.MULTILINE)
        assert found is not None, f"{path.name} names no checker"
        out.append(Mutant(path.stem, text.splitlines()[0], found[1], path))
    return out


def scratch(where: Path) -> Path:
    """A copy of the tree, as git tracks it and as it is now, that is imported instead of the installed package."""
    tree = where / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (where / "path").mkdir()
    (where / "path" / "kivi_server").symlink_to(tree / "server")
    return tree


def applied(mutant: Mutant, tree: Path, *, reverse: bool = False) -> None:
    """Raises CalledProcessError if the patch does not fit any more."""
    command = ["git", "apply", *(["--reverse"] if reverse else []), str(mutant.patch)]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True, env=environment)


def red(checker: str, tree: Path) -> tuple[bool, str]:
    """Whether the checker fails, and the line that says how. Raises RuntimeError if it cannot run at all."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree.parent / 'path'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *checker.split()]
    try:
        run = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=SECONDS_MAX, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return True, "it does not end"
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{checker} did not run:\n{run.stdout}\n{run.stderr}")
    told = [line for line in run.stdout.splitlines() if line.startswith("E  ")]
    return run.returncode == 1, told[0][1:].strip() if told else ""


def gate(names: list[str]) -> bool:
    """Prints a line for each bug; whether all were caught."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    good = True
    with tempfile.TemporaryDirectory(prefix="kivi-mutants-") as directory:
        tree = scratch(Path(directory))
        for checker in sorted({mutant.checker for mutant in chosen}):
            began = time.monotonic()
            failed, how = red(checker, tree)
            good = good and not failed
            print(
                f"{'RED  ' if failed else 'green'}  {time.monotonic() - began:6.1f} s  no bug: {checker} {how}",
                flush=True,
            )
        for mutant in chosen:
            began = time.monotonic()
            applied(mutant, tree)
            failed, how = red(mutant.checker, tree)
            applied(mutant, tree, reverse=True)
            good = good and failed
            verdict = "caught" if failed else "MISSED"
            print(
                f"{verdict} {time.monotonic() - began:6.1f} s  {mutant.name}: {mutant.checker}\n{'':17}{how}",
                flush=True,
            )
    return good


if __name__ == "__main__":
    raise SystemExit(0 if gate(sys.argv[1:]) else 1)
