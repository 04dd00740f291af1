"""The public names are a contract: programs outside this repository are written against them.

A name may be added here freely. Changing or removing one breaks somebody's program.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kivi
import kivi.api.interface
import kivi.errors

FUNCTIONS = {
    "case", "coalesce", "col", "combine", "connect", "count", "max", "min", "open", "sum", "time_slot", "transactional",
    "quad", "within_km",
}  # fmt: skip
MODULES = {"aio", "client", "errors", "polars", "spark", "testing"}
ERRORS = {
    "CommitUnknown",
    "Conflict",
    "DataLoss",
    "Disconnected",
    "FormatTooNew",
    "InvalidArgument",
    "KiviError",
    "NotAStore",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "Retryable",
    "RowExists",
    "SchemaError",
    "SnapshotTooOld",
    "StoreInUse",
    "Unauthenticated",
    "Unavailable",
}
# The same in process, over gRPC and under asyncio.
DATABASE = {
    "append", "appender", "checkpoint", "close", "consolidate", "create_aggregate", "create_aggregates", "create_view",
    "create_event_table", "create_table", "describe", "drop", "outcome", "run", "snapshot", "stats", "tables",
    "transaction", "watermark", "write",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS | MODULES | ERRORS))
def test_a_contracted_name_is_exported_and_loads(name: str) -> None:
    assert name in kivi.__all__
    assert getattr(kivi, name) is not None


def test_every_exported_name_loads_and_is_listed_by_dir() -> None:
    assert len(kivi.__all__) == len(set(kivi.__all__))
    assert set(kivi.__all__) <= set(dir(kivi))
    for name in kivi.__all__:
        getattr(kivi, name)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_is_there_after_import_kivi_alone(name: str) -> None:
    """In a fresh interpreter: here, some test has imported it already."""
    program = f"import kivi; print(kivi.{name}.__name__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == (f"kivi.{name}\n", "")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(kivi, "no_such_name")  # noqa: B009 (a type checker would refuse it as an attribute)


def test_every_error_is_exported_and_derives_from_one_class() -> None:
    assert set(kivi.errors.__all__) <= set(kivi.__all__)
    for name in kivi.errors.__all__:
        assert issubclass(getattr(kivi, name), kivi.errors.KiviError)


def test_the_database_in_process_has_the_contracted_methods(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data") as db:
        assert set(dir(db)) >= DATABASE


def public(kind: type) -> dict[str, object]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("module", ["kivi.embedded", "kivi.client", "kivi.aio"])
@pytest.mark.parametrize("kind", ["Database", "Transaction", "Snapshot"])
def test_methods_take_what_the_interface_says_and_are_documented(module: str, kind: str) -> None:
    """Names, order and defaults: a program that is written against one kind of database runs on the others."""
    own = getattr(importlib.import_module(module), kind)
    for name, contracted in public(getattr(kivi.api.interface, kind)).items():
        method = getattr(own, name)
        assert inspect.getdoc(method), name
        if not callable(contracted):
            continue
        wanted, given = inspect.signature(contracted).parameters, inspect.signature(method).parameters
        assert [(p.name, p.kind, p.default) for p in wanted.values()] == [
            (p.name, p.kind, p.default) for p in given.values() if p.name in wanted
        ], name
        more = [p for p in given.values() if p.name not in wanted]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more), name


def test_a_scan_is_called_as_contracted() -> None:
    """``inspect`` and editors see the arguments themselves, not how they are passed on."""
    assert str(inspect.signature(kivi.api.interface.Snapshot.to_arrow)).startswith("(self, table: 'str', prefix: ")
    assert list(inspect.signature(kivi.api.interface.Transaction.scan).parameters) == [
        "self", "table", "prefix", "start", "end", "where", "columns", "limit", "reverse",
        "order_by", "offset", "any_order",
    ]  # fmt: skip
    assert list(inspect.signature(kivi.api.interface.Database.create_table).parameters) == [
        "self", "name", "key", "columns", "history"
    ]  # fmt: skip


@pytest.mark.parametrize("module", ["kivi.client", "kivi.aio"])
def test_a_client_has_the_contracted_methods(module: str) -> None:
    classes = [c for _, c in inspect.getmembers(importlib.import_module(module), inspect.isclass)]
    assert any(set(dir(c)) >= DATABASE for c in classes), f"no class of {module} has all of {sorted(DATABASE)}"
