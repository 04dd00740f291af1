"""The sdist and the wheel, built once for all tests that want them, and environments that have the wheel.

``python -m build`` makes the sdist from a copy of the tree, and the wheel from the sdist, so what the sdist lacks is
missing in the wheel too. What kivi depends on is not downloaded again for an environment: it sees the packages of the
one that the tests run in, by their path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

__all__ = ["PACKAGES", "built", "installed", "wheel"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"kivi": "kivi", "kivi_server": "server"}  # installed as -> folder
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt", *(p.name for p in ROOT.glob("*.md")))
FOLDERS = (*PACKAGES.values(), "proto", "apm_demo", "docs", "tests")  # and what must not be packed


def copied(folder: Path) -> Path:
    """The tree without what was built in it: setuptools builds in place, and leftovers would be packed too."""
    names = list(SOURCES)
    for each in FOLDERS:
        names += [str(p.relative_to(ROOT)) for p in (ROOT / each).rglob("*") if "__pycache__" not in p.parts]
    for name in names:
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)  # with its mode: there is a program among them
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel."""
    source, out = copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (path,) = built.glob("kivi-*.whl")
    return path


def installed(wheel: Path, folder: Path) -> Path:
    """The ``bin`` of a new environment that has the wheel, and the packages that it depends on."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python")]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    # A path that a .pth file adds is not looked through for .pth files, so kivi's editable install there is not seen.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('platlib')}\n")
    return folder / "bin"
