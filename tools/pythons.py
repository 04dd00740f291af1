"""Runs tests on every supported Python of this machine but the one of .venv, on which all tests run.

``make pythons``; the arguments are pytest's. With ``--ends`` before them the minor versions between the oldest and the
newest of this machine are left to the night: what fails on one of those nearly always fails on an end as well. Each
Python gets an environment of its own, .venv-3.12.1 for example, with kivi, the extra ``test`` and nothing else. The
classifiers of pyproject.toml say which versions are looked for: on the search path, where Debian and people who compile
put theirs, and among pyenv's. Of several patch versions the oldest and the newest are taken, since what fails on one of
them fails on most; of the minor version of .venv none. A version that is not here is skipped, and the output says so.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_FROM = ("pyproject.toml", "setup.py", "constraints.txt")
Version = tuple[int, ...]


def say(text: str) -> None:
    print(f"kivi: {text}", flush=True)


def parsed(version: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def wanted() -> list[str]:
    """The minor versions of the classifiers, such as 3.12."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"])
    return sorted((each[1] for each in named if each), key=parsed)


def folders() -> Iterator[Path]:
    yield from map(Path, os.get_exec_path())
    yield from map(Path, ("/usr/bin", "/usr/local/bin"))
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from sorted(pyenv.glob("versions/*/bin"))


def found(minor: str) -> dict[Version, Path]:
    """Every Python of this minor version, by its full version; the first of several in one version."""
    here: dict[Version, Path] = {}
    for path in dict.fromkeys(folder / f"python{minor}" for folder in folders()):
        if not path.exists():
            continue
        probe = "import platform; print(platform.python_version(), flush=True); import venv, ensurepip"
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if not done.stdout:
            continue  # a shim of pyenv for a version that is not switched on
        version = parsed(done.stdout)
        if done.returncode:
            say(f"{path} is skipped: it has no venv module (on Debian and Ubuntu: apt-get install python{minor}-venv)")
        else:
            here.setdefault(version, path)
    return here


def environment(python: Path, version: str) -> Path:
    """The Python of the environment for it, which is made, or brought up to date, where that is needed."""
    folder = ROOT / f".venv-{version}"
    made, inner = folder / ".installed", folder / "bin" / "python"
    changed = max((ROOT / name).stat().st_mtime for name in INSTALLED_FROM)
    if made.exists() and made.stat().st_mtime >= changed:
        return inner
    say(f"creating {folder.name} from {python}")
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    # Not compiled as a whole, most of which is never imported.
    environ = {**os.environ, "PIP_COMPILE": "0"}
    subprocess.run([inner, "tools/install.py", "--editable", "test"], cwd=ROOT, check=True, env=environ)
    made.touch()
    return inner


def main(arguments: list[str]) -> int:
    failed, is_ends_only = False, arguments[:1] == ["--ends"]
    own = ".".join(platform.python_version_tuple()[:2])
    every = {minor: found(minor) for minor in wanted() if minor != own}
    there = sorted([own, *(minor for minor, here in every.items() if here)], key=parsed)
    say(f"Python {own} is the one of .venv: make test runs all tests on it")
    for minor, here in every.items():
        if not here:
            say(f"Python {minor} is skipped: it is not on this machine")
        elif is_ends_only and minor not in (there[0], there[-1]):
            say(f"Python {minor} is between {there[0]} and {there[-1]}: it is for the night (.ci/nightly)")
            continue
        for version in sorted({min(here), max(here)} if here else ()):
            name = ".".join(map(str, version))
            inner = environment(here[version], name)
            say(f"tests on Python {name}")
            began = time.monotonic()
            done = subprocess.run([inner, "-m", "pytest", *arguments[is_ends_only:]], cwd=ROOT, check=False)
            say(f"Python {name}: {'failed' if done.returncode else 'passed'} in {time.monotonic() - began:.0f} s")
            failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
