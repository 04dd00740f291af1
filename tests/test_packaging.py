"""What an installation adds to site-packages: kivi, kivi_server and apm_demo, and no generic name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"kivi": "kivi", "kivi_server": "server", "apm_demo": "apm_demo"}  # installed as -> folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree (setuptools builds in place, and leftovers would be packed too)."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = ["pyproject.toml", "setup.py"]
    for folder in PACKAGES.values():
        files += [str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    for name in files:
        if (source := ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    built = subprocess.run(
        [*pip, "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(copy)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("kivi-*.whl")
    return path


def test_the_wheel_has_exactly_three_top_level_names(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES.keys()


def test_the_wheel_has_every_file_of_the_tree(wheel: Path) -> None:
    """Modules in a folder without ``__init__.py``, and data not named in pyproject.toml, would be left out."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        str(Path(package, path.relative_to(ROOT / folder)))
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_an_editable_install_imports_the_tree(package: str, tmp_path: Path) -> None:
    """Run elsewhere and isolated (-I), so that only the installation can be what is found."""
    program = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
    found = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stderr}\nthe tests run from the environment that `make venv` installs"
    assert Path(found.stdout.strip()) == ROOT / PACKAGES[package] / "__init__.py"
