"""What tests of several folders use.

``require``, for tests that drive a program from outside this repository; ``spark``, one session for all of them, as
each takes many seconds to start; ``built`` and ``wheel``, the distribution.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import hypothesis
import pytest

from tests.spark.flags import JAVA_FLAGS
from tests.wheels import built, wheel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["built", "wheel"]

# A program's name here -> the names it goes by on different systems.
PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "chromedriver": ("chromedriver",),
    "prometheus": ("prometheus",),
}

# PySpark starts Java through a fork. In a process where another thread is in a call of gRPC, gRPC's own handlers may
# abort the child before it has become Java (seen once in some hundred starts); nobody here uses gRPC after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# NumPy starts a thread for each processor that waits for matrices to multiply, by turning in circles for 30 ms first.
# There are hundreds of processes here, and no matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The model's world compares as tests do: what it asserts says what was seen and what was expected.
pytest.register_assert_rewrite("tests.mvcc.world")

# How many examples a property is tried with is said here, and by no test: some each time, very many by night
# (``make properties``). Fifty find every planted bug that a property has to find. Machines differ and are shared: a
# slow example is no failure, a stuck test meets pytest's timeout.
hypothesis.settings.register_profile("kivi", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("kivi"), max_examples=1_000)
hypothesis.settings.load_profile("kivi")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


HERE: Final = Path(__file__).parent

# Of Spark, wherever a test starts it: Java with one compiler, and Python processes that find PySpark compiled.
os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_FLAGS)
_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if str(HERE / "spark" / "unpacked") not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "spark" / "unpacked"), *_paths])

MEMORY: Final = Path("/dev/shm")
MEMORY_BYTES_MIN: Final = 4 << 30


def pytest_configure(config: pytest.Config) -> None:
    """``tmp_path`` is in memory where there is room: every commit waits for a sync, and five processes for one disk.

    What a sync is worth is tested by files that lose what was not synced, wherever they are. ``on_disk`` is for tests
    of the file system's own ways. ``--basetemp`` and ``TMPDIR`` are left as they are.
    """
    if config.getoption("basetemp") or os.environ.get("TMPDIR") or not os.access(MEMORY, os.W_OK):
        return
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize >= MEMORY_BYTES_MIN and not found.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory that is on a disk, if the system's temporary files are."""
    with tempfile.TemporaryDirectory(prefix="kivi-test-") as path:
        yield Path(path)


ABOUT_BLOCKS = {
    "test_a_snapshot_from_before_the_floor_reads_on",
    "test_no_value_stays_in_blocks",
    "test_changes_when_the_values_are_gone",
    "test_a_cut_commit_that_is_retracted_in_part",
    "test_blocks_are_read_only_where_a_header_is_not_enough",
    "test_a_step_that_fails_leaves_everything_as_it_was",
    "test_what_a_crash_leaves_is_deleted",
}
"""Tests of what blocks alone do, or the step that settles them: how much is dropped, made blank, or read at once."""


@pytest.fixture(autouse=bool(os.environ.get("SETTLING_FORCED")))
def _settling(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """With ``SETTLING_FORCED=1`` all events are settled whenever a test consolidates: no other may notice (R23)."""
    from kivi.store.facade import Store

    if request.node.originalname in ABOUT_BLOCKS:
        return

    consolidate = Store.consolidate

    def and_settle(store: Store) -> int:
        upto = consolidate(store)
        store.settle(max(64, store.settler.waiting() // 3))
        return upto

    monkeypatch.setattr(Store, "consolidate", and_settle)


def require(program: str) -> str:
    """The path of ``program``; without it, skips the test, or fails it in continuous integration (``KIVI_CI``)."""
    for name in PROGRAMS.get(program, (program,)):
        if path := shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name):
            return path
    reason = f"{program} is not installed"
    if os.environ.get("KIVI_CI"):
        pytest.fail(f"{reason}, and KIVI_CI forbids skipping: .ci/run has to install it", pytrace=False)
    pytest.skip(reason)


def pytest_itemcollected(item: pytest.Item) -> None:
    """In several processes a file's tests stay together, and those that share a Spark session are in one of them: it
    has a Java process, of half a gigabyte and some hundred threads, that takes long to get under way, so they are
    stories, as those of a browser are; so do those of the wheel, which is built once. Other stories are long: they stay
    together only where their file has something for several tests."""
    group = item.nodeid.partition("::")[0]
    asks = getattr(item, "fixturenames", ())
    if "spark" in asks:
        group = "spark"
        item.add_marker(pytest.mark.story)
    elif "browser" in asks:
        item.add_marker(pytest.mark.story)
    elif "built" in asks:
        group = "built"
    elif item.get_closest_marker("story") and not _shares(item, group):
        group = item.nodeid
    item.add_marker(pytest.mark.xdist_group(group))


def _shares(item: pytest.Item, file: str) -> bool:
    found = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(each.baseid == file and each.scope != "function" for defined in found for each in defined)


def _takes(item: pytest.Item) -> float:
    """Of a story, the seconds that it may take at most."""
    told = item.get_closest_marker("timeout") if item.get_closest_marker("story") else None
    return float(told.args[0]) if told else 0.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that need Spark come first, since their group is the longest and would be alone at the end; then stories
    by how long they may take; then the files of this folder, since some are long and would be the last."""
    first = {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path not in first, -_takes(item), item.path.parent != HERE))


gc.disable()  # while modules are loaded and tests collected, all of which stays


def pytest_collection_finish() -> None:
    """Thousands of tests and all their modules stay to the end: no garbage collection looks at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(name="require")
def _require() -> Callable[[str], str]:
    """``require`` as a fixture, for tests that would import nothing else from here."""
    return require


def _machine() -> str:
    """What a program that does not start may lack."""
    said = [f"threads: {sum(1 for _ in Path('/proc').glob('[0-9]*/task/*'))}"]
    for name in (
        "/proc/meminfo",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/pids.max",
    ):
        with contextlib.suppress(OSError):
            said.append(f"{name}: {' '.join(Path(name).read_text().split()[:9])}")
    return "\n".join(said)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two tasks at once; a task may fail three times. Its Python processes have no pandas, as ``kivi[spark]`` brings
    none: where there is one pyarrow imports it in each of them."""
    from tests.spark import helpers

    folder = tmp_path_factory.mktemp("spark")
    (folder / "pandas.py").write_text("raise ModuleNotFoundError('Spark has no pandas here', name='pandas')\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        running = _started({**helpers.settings(folder), "spark.log.level": "OFF"})
    for source in (helpers.Flaky, helpers.Doomed, helpers.Killed, helpers.Spy):
        running.dataSource.register(source)
    yield running
    running.stop()


def _started(settings: dict[str, str]) -> SparkSession:
    import kivi.spark
    from kivi.spark.java import JavaFailed

    try:
        return kivi.spark.session("tests", master="local[2,4]", **settings)
    except JavaFailed as error:  # a machine that is short of memory or threads for a moment: Java is not what is tested
        print(f"{error}\n{_machine()}", file=sys.stderr)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # what PySpark leaves of a Java that has ended
    time.sleep(10)
    return kivi.spark.session("tests", master="local[2,4]", **settings)
