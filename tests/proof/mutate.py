"""The mutation gate: each planted bug is a patch, and every checker that it names must report a mismatch on it.

``python -m tests.proof.mutate [NAME...]`` copies what git tracks to a scratch directory and, for each patch in
``mutants/``, applies it there and runs its checkers. A patch begins with a sentence that says what is wrong, and a line
``Checker: ARGUMENTS`` for each run of pytest that has to notice; more lines may follow that say what the bug does, so
that it can be planted again where the code has moved to.

A bug is caught if the first test that fails was failed by a *mismatch*: an assertion of a checker, as the replay
oracle's ``Mismatch`` is one. A TypeError or an ImportError says that the patch does not run, or that the product broke
in some other way, and proves nothing about the checker: that is an error of the gate, and so is a checker that is red
without the bug, or one that does not end. Where the product itself finds the mismatch, as recovery does when it
misses what was acknowledged, the patch gives a regular expression of what it says then: ``Caught as: DataLoss: .* was
acknowledged``.

Prints which checker caught which bug and by what, and how long it took.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "Verdict", "gate", "mutants", "verdict"]

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).with_name("mutants")
SECONDS_MAX = 400


@dataclass(frozen=True)
class Mutant:
    """A patch, what is wrong with it, the tests that must notice, and what the product may say where that is the
    mismatch."""

    name: str
    why: str
    checkers: tuple[str, ...]
    caught_as: tuple[str, ...]
    patch: Path


@dataclass(frozen=True)
class Verdict:
    """What a checker said. ``mismatch``: its first failure is an assertion of its own."""

    failed: bool
    mismatch: bool
    how: str


def mutants() -> list[Mutant]:
    """All of them, by name."""
    out = []
    for path in sorted(PATCHES.glob("*.patch")):
        head = path.read_text(encoding="utf-8").partition("diff --git")[0]
        checkers = re.findall(r"^Checker: (.+)$", head, re.MULTILINE)
        caught_as = re.findall(r"^Caught as: (.+)$", head, re.MULTILINE)
        assert checkers, f"{path.name} names no checker"
        out.append(Mutant(path.stem, head.splitlines()[0], tuple(checkers), tuple(caught_as), path))
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
    (where / "path" / "sitecustomize.py").write_text(_IMPORTS.format(tree=str(tree)), encoding="utf-8")
    return tree


_IMPORTS = """\
# Run by every Python process of the gate, the servers that tests start included: an editable install may put itself
# before everything else, and then the checkers would judge the code without the bug.
import importlib.util, os, sys

class FromTheTree:
    rooms = {{"kivi": "kivi", "kivi_server": "server", "apm_demo": "apm_demo"}}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.rooms:
            folder = os.path.join({tree!r}, cls.rooms[name])
            file = os.path.join(folder, "__init__.py")
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])

sys.meta_path.insert(0, FromTheTree)
"""


def imports_the_tree(tree: Path) -> bool:
    """Whether a process of the gate runs the code that is patched."""
    code = "import kivi, kivi_server; print(kivi.__file__); print(kivi_server.__file__)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=_environment(tree), check=False)
    found = run.stdout.splitlines()
    return len(found) == 2 and all(Path(name).is_relative_to(tree) for name in found)


def _environment(tree: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{tree.parent / 'path'}{os.pathsep}{tree}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def applied(mutant: Mutant, tree: Path, *, reverse: bool = False) -> None:
    """Raises CalledProcessError if the patch does not fit any more."""
    command = ["git", "apply", *(["--reverse"] if reverse else []), str(mutant.patch)]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True, env=environment)


def verdict(checker: str, tree: Path) -> Verdict:
    """What the checker says of the tree. Raises RuntimeError if it cannot run at all."""
    said = tree.parent / "failures.json"
    said.unlink(missing_ok=True)
    environment = {**_environment(tree), "MUTANT_FAILURES": str(said)}
    plugins = ["-p", "no:cacheprovider", "-p", "tests.proof.failures"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *shlex.split(checker)]
    try:
        run = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=SECONDS_MAX, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, False, "it does not end")
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{checker} did not run:\n{run.stdout}\n{run.stderr}")
    if run.returncode == 0:
        return Verdict(False, False, "")
    if not said.exists():
        return Verdict(True, False, "a test failed, and its error is not known")
    first = json.loads(said.read_text(encoding="utf-8"))[0]
    return Verdict(True, first["mismatch"], f"{first['error']}: {first['message']} ({first['where']})")


def gate(names: list[str]) -> bool:
    """Prints a line for each checker of each bug; whether all were caught."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    good = bool(chosen)
    with tempfile.TemporaryDirectory(prefix="kivi-mutants-") as directory:
        tree = scratch(Path(directory))
        if not imports_the_tree(tree):
            print("ERROR  the checkers would import kivi from somewhere else than the tree that is patched")
            return False
        for checker in sorted({checker for mutant in chosen for checker in mutant.checkers}):
            began = time.monotonic()
            said = verdict(checker, tree)
            good = good and not said.failed
            head = "RED  " if said.failed else "green"
            print(f"{head}  {time.monotonic() - began:6.1f} s  no bug: {checker} {said.how}", flush=True)
        for mutant in chosen:
            applied(mutant, tree)
            for checker in mutant.checkers:
                began = time.monotonic()
                said = verdict(checker, tree)
                caught = said.mismatch or (said.failed and any(re.match(e, said.how) for e in mutant.caught_as))
                good = good and caught
                head = "caught" if caught else "ERROR " if said.failed else "MISSED"
                print(
                    f"{head} {time.monotonic() - began:6.1f} s  {mutant.name}: {checker}\n{'':17}{said.how}", flush=True
                )
            applied(mutant, tree, reverse=True)
    return good


if __name__ == "__main__":
    raise SystemExit(0 if gate(sys.argv[1:]) else 1)
