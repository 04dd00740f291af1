"""A real cluster: a standalone master and two workers, none of which can import the kivi of this clone.

The commands are those of the guide (docs/howto/spark.md), taken from there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

import kivi
from kivi.spark.java import JavaNotFound, find_java
from tests.serverproc import ROOT
from tests.spark.flags import JAVA_FLAGS
from tests.spark.helpers import create
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

SPARK_HOME = Path(pyspark.__path__[0])
JOB = ROOT / "tests" / "spark" / "cluster_job.py"
SETTINGS = {
    "spark.executor.memory": "512m", "spark.driver.memory": "512m", "spark.ui.enabled": "false",
    "spark.driver.extraJavaOptions": JAVA_FLAGS, "spark.executor.extraJavaOptions": JAVA_FLAGS,
    "spark.sql.session.timeZone": "UTC",
    # Both workers are there before anything is done: on a busy machine the second one may come when all of it is.
    "spark.cores.max": "2", "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}  # fmt: skip
SMALL = [part for name, value in SETTINGS.items() for part in ("--conf", f"{name}={value}")]


def commands_of_the_guide() -> list[str]:
    """The lines of the guide that ship kivi to a cluster."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "docs/howto/spark.md").read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "spark-submit" in block]
    joined = found.replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in joined.splitlines()]


class Daemon:
    """A program of Spark's, and what it prints."""

    def __init__(self, *arguments: str, env: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd, start_new_session=True,
        )  # fmt: skip
        self.output: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.output.extend(self.process.stdout)

    def wait_for(self, pattern: str, timeout_s: float = 90.0) -> re.Match[str]:
        def said() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            found = [match for line in list(self.output) if (match := re.search(pattern, line))]
            assert found or not ended, missing()
            return found[0] if found else None

        def missing() -> str:
            return f"{pattern!r} is not there: {''.join(self.output)}"

        match = wait_until(said, timeout_s, reason=missing, pause_s=0.1)
        assert match is not None
        return match

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with kivi's dependencies and without kivi: the site of an editable kivi counts as a plain folder."""
    folder = tmp_path_factory.mktemp("workers") / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    program = folder / "bin" / "python"
    site = subprocess.run(
        [program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "dependencies.pth").write_text("\n".join({sysconfig.get_path(p) for p in ("purelib", "platlib")}))
    asked = subprocess.run(
        [program, "-c", "import pyarrow, grpc, pyspark, kivi"], capture_output=True, text=True, cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )  # fmt: skip
    assert "No module named 'kivi'" in asked.stderr, asked.stderr
    return str(program)


@pytest.fixture(scope="module")
def environment(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    try:
        java = find_java()
    except JavaNotFound as error:
        pytest.skip(str(error))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    scratch = str(tmp_path_factory.mktemp("scratch"))
    return kept | {
        **{name: value for name, value in java.environment.items() if value is not None},
        "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": scratch,
        "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": JAVA_FLAGS,
        "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python,
    }  # fmt: skip


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a master with two workers of one core each."""
    folder = tmp_path_factory.mktemp("cluster")
    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    daemons = [Daemon("org.apache.spark.deploy.master.Master", *here, env=environment, cwd=folder)]
    try:
        address = daemons[0].wait_for(r"Starting Spark master at spark://(\S+)")[1]
        for number in range(2):
            room = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker{number}"))
            worker = "org.apache.spark.deploy.worker.Worker"
            daemons.append(Daemon(worker, *here, *room, f"spark://{address}", env=environment, cwd=folder))
        for daemon in daemons[1:]:
            daemon.wait_for("Successfully registered with master")
        yield address
    finally:
        for daemon in reversed(daemons):
            daemon.stop()


@pytest.mark.story
def test_a_job_that_brings_kivi_along(cluster, environment, python, server, db, tmp_path) -> None:
    pack, submit = commands_of_the_guide()
    (tmp_path / "job.py").write_text(JOB.read_text())
    create(db, "shipped")
    packed(pack, tmp_path)
    with zipfile.ZipFile(tmp_path / "kivi.zip") as packed_kivi:
        assert "kivi/spark/source.py" in packed_kivi.namelist()
    command = shlex.split(submit.replace("HOST:7077", cluster))
    assert command[0] == "spark-submit" and f"spark://{cluster}" in command
    out = tmp_path / "out.json"
    ran = subprocess.run(
        [str(SPARK_HOME / "bin" / command[0]), *SMALL, *command[1:], server.endpoint, "shipped", str(out)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, told(ran.stderr)
    said = check(out, db, "shipped")
    assert {executor for executor, _ in said["seen"]} == {"0", "1"}, "both workers"
    for path in (said["driver"], *(path for _, path in said["seen"])):
        assert "kivi.zip" in path and str(ROOT) not in path, path


@pytest.mark.story
def test_spark_connect(environment, python, server, db, tmp_path) -> None:
    """The server's Python has no kivi: the client brings it along."""
    packed(commands_of_the_guide()[0], tmp_path)
    create(db, "connected")
    connect = "org.apache.spark.sql.connect.service.SparkConnectServer"
    arguments = ("--master", "local[2]", "--conf", "spark.connect.grpc.binding.port=0")
    spark_submit = ("org.apache.spark.deploy.SparkSubmit", "--class", connect, *SMALL, *arguments)
    daemon = Daemon(*spark_submit, env={**environment, "SPARK_DAEMON_MEMORY": "600m"}, cwd=tmp_path)
    try:
        port = daemon.wait_for(r"Spark Connect server started at: \S*:(\d+)")[1]
        out = tmp_path / "out.json"
        ran = subprocess.run(
            [sys.executable, str(JOB), server.endpoint, "connected", str(out), f"sc://127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
        assert ran.returncode == 0, told(ran.stderr)
    finally:
        daemon.stop()
    said = check(out, db, "connected")
    assert str(ROOT) in said["driver"]
    assert all("kivi.zip" in path and str(ROOT) not in path for _, path in said["seen"]), said


def told(stderr: str) -> str:
    """What a program said, without Java's stacks."""
    return "\n".join(line for line in stderr.splitlines() if not line.strip().startswith("at "))[-8_000:]


def packed(command: str, folder: Path) -> None:
    """Runs the command of the guide beside ``kivi``, which then goes: programs look beside themselves, too."""
    words = shlex.split(command)
    assert words[0] == "python"
    (folder / "kivi").symlink_to(ROOT / "kivi")
    subprocess.run([sys.executable, *words[1:]], cwd=folder, check=True)
    (folder / "kivi").unlink()


def check(out: Path, db: Any, table: str) -> Any:
    said = json.loads(out.read_text())
    assert said["total"] == [2500, sum(3 * i for i in range(5000) if i % 20 < 10)]
    assert said["head"] == [5000, sum(3 * i for i in range(5000))]
    with db.snapshot() as snap:
        assert snap.summary(table, {"n": kivi.count()}) == {"n": 5000}
        assert sum(row["invocations"] for row in snap.scan(f"{table}_5m")) == 5000
    return said
