"""The distribution: what the sdist and the wheel hold, and that an installed kivi serves without the checkout.

``tests.wheels`` builds both, and installs the wheel into an environment of its own
(``tests/ops/test_docker.py`` installs all that it depends on from the index).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kivi
from tests.serverproc import ROOT, ServerProcess
from tests.wheels import PACKAGES, installed


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("clean"))


@pytest.mark.story
def test_the_wheel_has_exactly_two_top_level_names(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES.keys()


@pytest.mark.story
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


@pytest.mark.story
def test_the_launcher_of_java_can_be_run_where_the_wheel_is_installed(clean: Path) -> None:
    (launcher,) = clean.parent.glob("lib/python*/site-packages/kivi/spark/launcher/bin/java")
    assert os.access(launcher, os.X_OK)


@pytest.mark.story
def test_the_sdist_has_the_sources_and_neither_tests_nor_the_demonstration(built: Path) -> None:
    (path,) = built.glob("kivi-*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "constraints.txt"} <= names
    assert {"kivi/__init__.py", "server/__init__.py", "proto/kivi/v1/service.proto"} <= names
    assert not [name for name in names if name.startswith(("tests/", "apm_demo/", "docs/"))]


@pytest.mark.story
def test_versions_agree(wheel: Path) -> None:
    """One source, ``kivi.__version__``; and the changelog begins with it."""
    assert wheel.name.startswith(f"kivi-{kivi.__version__}-")
    found = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None and found[1] == kivi.__version__


@pytest.mark.story
def test_an_installed_kivi_serves_and_commits(clean: Path, tmp_path: Path) -> None:
    """From the clean environment alone: the embedded store, the server, a client, the command line."""

    def run(*command: str) -> str:
        done = subprocess.run([str(clean / command[0]), *command[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    where = "import kivi, kivi_server, sys; print(kivi.__file__); print(kivi_server.__file__); print(sys.prefix)"
    kivi_file, server_file, prefix = run("python", "-I", "-c", where).splitlines()
    assert kivi_file.startswith(prefix) and server_file.startswith(prefix)
    lost = "import importlib.util as u; print([u.find_spec(n) for n in ('apm_demo', 'server', 'proto', 'tests')])"
    assert run("python", "-I", "-c", lost) == "[None, None, None, None]"

    embedded = """
import kivi
with kivi.open("data") as db:
    db.create_table("accounts", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
    with db.transaction() as tx:
        tx.delta("accounts", (1,), balance=21)
    print(tx.commit_ts > 0, db.get("accounts", (1,))["balance"])
"""
    assert run("python", "-I", "-c", embedded) == "True 21"

    server = ServerProcess(tmp_path / "data")
    server.command = [str(clean / "kivi"), "serve"]
    with server:
        run("kivi", "delta", "accounts", "1", "balance=16", "--endpoint", server.endpoint)
        assert run("kivi", "get", "accounts", "1", "-o", "csv", "--endpoint", server.endpoint) == "id,balance\n1,37"
        assert server.stop() == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_an_editable_install_imports_the_tree(package: str, tmp_path: Path) -> None:
    """Run elsewhere and isolated (-I), so that only the installation can be what is found."""
    program = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
    found = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stderr}\nthe tests run from the environment that `make venv` installs"
    assert Path(found.stdout.strip()) == ROOT / PACKAGES[package] / "__init__.py"
