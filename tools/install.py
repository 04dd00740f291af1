"""Installs what constraints.txt pins into the environment of the Python that runs this: all tasks do it so.

::

    .venv/bin/python tools/install.py --editable spark,demo     kivi, as it lies here, what it needs, and two extras
    .venv/bin/python tools/install.py --copied cluster,http     likewise, of a copy: the sources may be read only
    .venv/bin/python tools/install.py --only audit              what extras ask for, without kivi

**Invariant.** Nothing that comes over a network is installed, or run in order to install something, unless
constraints.txt has its SHA-256. pip holds to it (``--require-hashes``), for what is asked for and for whatever that
needs: from 26 on it takes hashes of constraints for both. Hence the order:

1. the pinned pip and setuptools, by the pip that the environment was made with, which may be an old one. It takes
   hashes of requirements alone, so these two are its requirements;
2. what kivi and the extras ask for, by that pip. What has no wheel is built by that setuptools: in an environment of
   its own (build isolation) it would be built by one that nobody has hashed;
3. kivi itself, which has no hash, without dependencies and without an index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
COPIED = ("pyproject.toml", "setup.py", "README.md", "kivi", "server")  # what kivi is built from
# -qq: pip's remarks about the machine's configuration are not ours to print; its errors still are.
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq")


def pinned(*names: str) -> str:
    """The entries of these packages in constraints.txt, with their hashes."""
    entry = rf"^(?:{'|'.join(map(re.escape, names))})==(?:.*\\\n)*.*\n"
    return "".join(re.findall(entry, CONSTRAINTS.read_text(), re.MULTILINE))


def requirements(extras: Iterable[str], *, own: bool) -> list[str]:
    """What the extras ask for, and with ``own`` kivi itself, as pyproject.toml has it. Raises KeyError."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict.fromkeys(project["dependencies"] if own else ())
    waiting, known = list(extras), set[str]()
    while waiting:
        if (extra := waiting.pop()) in known:
            continue
        known.add(extra)
        for each in project["optional-dependencies"][extra]:
            if others := re.fullmatch(r"kivi\[([\w,]+)\]", each):
                waiting += others[1].split(",")
            else:
                found[each] = None
    return list(found)


def run(*arguments: str) -> None:
    subprocess.run([*PIP, *arguments], check=True, cwd=ROOT)


def install(extras: list[str], kivi: str) -> None:
    """``kivi``: editable, copied or only. Raises KeyError for an extra that there is not, CalledProcessError."""
    wanted = requirements(extras, own=kivi != "only")
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first.txt")
        first.write_text(pinned("pip", "setuptools"))
        run("--require-hashes", "-r", str(first))
        run("--require-hashes", "--no-build-isolation", "-c", str(CONSTRAINTS), *wanted)
        if kivi == "only":
            return
        source = ["-e", str(ROOT)]
        if kivi == "copied":
            Path(folder, "kivi").mkdir()
            for name in COPIED:
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, Path(folder, "kivi", name))
            source = [str(Path(folder, "kivi"))]
        run("--no-index", "--no-deps", "--no-build-isolation", *source)


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs what constraints.txt pins, by its hashes.")
    kinds = parser.add_mutually_exclusive_group(required=True)
    for kind in ("editable", "copied", "only"):
        kinds.add_argument(f"--{kind}", metavar="EXTRAS")
    (kind, text), *_ = ((name, value) for name, value in vars(parser.parse_args()).items() if value is not None)
    try:
        install([each for each in text.split(",") if each], kind)
    except KeyError as missing:
        parser.error(f"pyproject.toml has no extra {missing}")
    except subprocess.CalledProcessError as failed:
        return failed.returncode  # pip has said why
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
