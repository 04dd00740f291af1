"""What the image is made of, without an engine: the files are linted, and what their commands do is done here."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kivi_server.options import add_arguments, options_of
from ruamel.yaml import YAML

from kivi.cluster import peers_of
from tests.conftest import require
from tests.ports import Port
from tests.serverproc import ROOT

DOCKER = ROOT / "docker"
TOOLS = Path(sysconfig.get_path("scripts"))
NOBODY = 65_534
COPIED = (
    *("pyproject.toml", "setup.py", "constraints.txt", "README.md"),
    *("kivi", "server", "apm_demo", "docker", "tools/install.py"),
)


def test_the_dockerfile_is_linted() -> None:
    done = subprocess.run([TOOLS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


COMPOSED = ("compose.yaml", "cluster.yaml")


def composed(name: str) -> Any:
    return YAML(typ="safe").load((DOCKER / name).read_text())


@pytest.mark.parametrize("name", COMPOSED)
def test_compose_is_as_its_schema_says(name: str) -> None:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(DOCKER / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", COMPOSED)
def test_what_compose_names_is_there(name: str) -> None:
    compose = composed(name)
    targets = re.findall(r"^FROM \S+ AS (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for service in compose["services"].values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve().exists()
            assert service["build"].get("target", "server") in targets
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "published beyond this machine"
        assert set(service.get("secrets", ())) <= set(compose.get("secrets", ()))


def test_images_of_others_are_named_by_their_digest() -> None:
    """What a tag names today another image may be tomorrow."""
    built = re.findall(r"^FROM (\S+) AS (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    others = {image for image, _ in built} - {name for _, name in built}
    others |= {
        service["image"] for name in COMPOSED for service in composed(name)["services"].values() if "image" in service
    }
    assert len(others) == 3
    for image in others:
        assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_each_node_of_the_cluster_is_one_of_its_peers(tmp_path: Path) -> None:
    """What each container is told makes a node, which finds its own address among the peers by its name."""
    services = composed("cluster.yaml")["services"]
    for service, node in services.items():
        environment = {**node["environment"], "KIVI_DATA": str(tmp_path / service)}
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = options_of(parser.parse_args([]), environment)
        assert options.peers is not None and options.insecure and options.cluster_secret_file
        peers = [peer.rpartition(":")[0] for peer in peers_of(options.peers)]
        assert peers == list(services) and options.advertise == f"{service}:7420"


def test_what_watches_the_server_is_told_of_it() -> None:
    compose = composed("compose.yaml")
    (scraped,) = YAML(typ="safe").load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    name, _, port = scraped["static_configs"][0]["targets"][0].partition(":")
    assert name in compose["services"] and f"KIVI_METRICS=0.0.0.0:{port}" in (DOCKER / "Dockerfile").read_text()
    data_source = YAML(typ="safe").load((DOCKER / "grafana/provisioning/datasources/kivi.yml").read_text())
    assert data_source["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = YAML(typ="safe").load((DOCKER / "grafana/provisioning/dashboards/kivi.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["services"]["grafana"]["volumes"]


def test_every_file_of_the_image_is_in_its_context() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert f"!{source}" in ignored and (ROOT / source).exists(), source


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """The image's tree in a clean directory: the sources read only, and what install.sh makes of them."""
    folder = Path(tempfile.mkdtemp(prefix="kivi-image-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / "src" / name)
        for name in ("opt", "home", "data"):
            (folder / name).mkdir()
            if os.getuid() == 0:
                os.chown(folder / name, NOBODY, NOBODY)
        # Most of what is installed is never imported here: nothing is compiled before it is.
        installed = run(folder, str(folder / "src/docker/install.sh"), str(folder / "opt/kivi"), PIP_COMPILE="0")
        assert installed.returncode == 0, installed.stdout + installed.stderr
        yield folder
    finally:
        shutil.rmtree(folder)


@functools.cache
def python_of_anybody() -> str:
    """A Python that the unprivileged user may run, which root's own need not be."""
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    for candidate in (os.path.realpath(sys.executable), "/usr/local/bin/python3", "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([candidate, "-c", probe], capture_output=True, check=False, **user).returncode == 0:
                return candidate
    return require("a Python 3.11 with venv that any user may run")


def as_nobody(folder: Path) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    environment = {
        **kept,
        "PATH": f"{folder}/opt/kivi/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "home"),
        "PYTHON": python_of_anybody(),
        "PYTHONUNBUFFERED": "1",
        "KIVI_DATA": str(folder / "data"),
    }
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    return {"env": environment, "cwd": folder / "home", "text": True, **user}


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    options = as_nobody(folder)
    options["env"] |= environment
    return subprocess.run(command, capture_output=True, check=False, **options)


@pytest.mark.story
@pytest.mark.timeout(600)
def test_the_image_serves_is_healthy_and_stops(image: Path) -> None:
    entry = str(image / "src/docker/entrypoint.sh")
    port = Port()
    address = f"localhost:{port.number}"
    options = as_nobody(image)
    options["env"]["KIVI_LISTEN"] = address
    server = subprocess.Popen([entry], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    try:
        assert server.stdout is not None
        assert next(line for line in server.stdout if "listening" in line).split()[-1] == address
        check = json.loads(re.findall(r"HEALTHCHECK.*CMD (\[.*\])", (DOCKER / "Dockerfile").read_text())[0])
        health = run(image, entry, *check[1:], KIVI_ENDPOINT=address)
        assert health.returncode == 0 and "healthy" in health.stdout, health.stderr
        version = run(image, entry, "python", "-c", "import kivi, kivi_server; print(kivi.__file__)")
        assert version.stdout.startswith(str(image / "opt/kivi")), version.stderr
        server.terminate()
        assert server.wait(60) == 0
        assert run(image, entry, *check[1:], KIVI_ENDPOINT=address).returncode == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    assert (image / "data" / "log").is_dir()
    assert not [path for path in (image / "src").rglob("*") if path.name.endswith((".egg-info", "build"))]


@pytest.mark.story
def test_a_volume_of_another_user_is_one_line_that_says_so(image: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a directory of another user")
    foreign = image / "foreign"
    foreign.mkdir(mode=0o755)
    began = time.monotonic()
    done = run(image, str(image / "src/docker/entrypoint.sh"), KIVI_DATA=str(foreign))
    assert done.returncode == 1 and time.monotonic() - began < 10
    assert (
        done.stderr
        == f"kivi: user {NOBODY} cannot write to {foreign}: mount a volume there that belongs to that user\n"
    )
