"""constraints.txt: whatever a task installs has its version in it, and hashes; tools/install.py holds to them.

What pip itself does is tried with packages made here, in a tree of their own, without a network and without installing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.install import ROOT, requirements

EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])

ENTRY = re.compile(r"(\S+)==(\S+)(?: ; (?:[^\\]+))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def pins(text: str) -> dict[str, set[str]]:
    """Name -> versions, of which there is more than one where Pythons or platforms need others."""
    found: dict[str, set[str]] = {}
    for name, pin, _ in ENTRY.findall(text):
        found.setdefault(name, set()).add(pin)
    return found


def test_every_line_of_the_constraints_is_a_pin_with_hashes() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert re.sub(r"^#.*\n", "", ENTRY.sub("", text), flags=re.MULTILINE) == ""
    assert len(pins(text)) > 100


def test_everything_that_pyproject_asks_for_is_pinned_within_its_bounds() -> None:
    known = pins((ROOT / "constraints.txt").read_text())
    for text in requirements(EXTRAS, own=True):
        asked = Requirement(text)
        found = known.get(canonicalize_name(asked.name), set())
        assert found, f"{asked.name} is not pinned: make pins"
        assert all(asked.specifier.contains(each, prereleases=True) for each in found), f"{text}: {found}"


def test_an_extra_brings_those_that_it_names() -> None:
    assert {"pytest", "moto[s3]", "nats-py", "mypy"} <= {
        re.split("[<>=]", each)[0] for each in requirements(["dev"], own=False)
    }
    with pytest.raises(KeyError, match="nonsense"):
        requirements(["nonsense"], own=True)


def wheel(folder: Path, name: str, needs: str = "") -> str:
    """A wheel of nothing, in version 1; its SHA-256."""
    path, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose extra asks for a package that needs another one, which its constraints have by their hashes."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = []\noptional-dependencies = {some = ["kivitesta"]}\n'
    )
    hashes = {
        "kivitesta": wheel(tmp_path, "kivitesta", "Requires-Dist: kivitestb\n"),
        "kivitestb": wheel(tmp_path, "kivitestb"),
    }
    # pip and setuptools are here, in these versions: nothing is fetched for them.
    own = "".join(f"{name}=={version(name)} \\\n    --hash=sha256:{'0' * 64}\n" for name in ("pip", "setuptools"))
    lines = (f"{name}==1 \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items())
    (tmp_path / "constraints.txt").write_text(own + "".join(lines))
    return tmp_path


def tried(tree: Path) -> subprocess.CompletedProcess[str]:
    only_here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tree), "PIP_DRY_RUN": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "tools/install.py", "--only", "some"]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, **only_here}, capture_output=True, text=True, check=False
    )


def test_what_has_its_hash_is_installed(tree: Path) -> None:
    done = tried(tree)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["kivitesta", "kivitestb"])
def test_another_file_of_the_same_version_is_refused(tree: Path, name: str) -> None:
    """Of what is asked for, and of what that needs."""
    wheel(tree, name, "Summary: another\n")
    done = tried(tree)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr and name in done.stderr


def test_what_is_not_pinned_is_refused(tree: Path) -> None:
    path = tree / "constraints.txt"
    path.write_text(re.sub(r"kivitestb==.*\n.*\n", "", path.read_text()))
    done = tried(tree)
    assert done.returncode != 0 and "kivitestb" in done.stderr and "==" in done.stderr
