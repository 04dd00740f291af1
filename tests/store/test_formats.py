"""Stores that older versions made, as a crash left them: opened as they are, the same answers, and theirs no more."""

from __future__ import annotations

import datetime as dt
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix
from kivi.engine.rocks import RocksEngine
from kivi.store.opening import FORMAT, FORMAT_ALONE
from tests.waiting import wait_until

FORMATS = Path(__file__).parent / "formats"


def plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value


def extract(archive: tarfile.TarFile, into: Path) -> None:
    """Files and folders, all of them below ``into``. ``extractall(filter="data")`` came only with Python 3.11.4."""
    into = into.resolve()
    for member in archive:
        path = (into / member.name).resolve()
        content = archive.extractfile(member) if member.isreg() else None
        if not path.is_relative_to(into) or (content is None and not member.isdir()):
            raise ValueError(f"the archive holds {member.name!r}, which is neither a file nor a folder below {into}")
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())


def rows(snapshot: Any, table: str) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in snapshot.scan(table)]


def test_every_older_format_has_a_store_here() -> None:
    assert {path.stem.removesuffix(".tar") for path in FORMATS.glob("*.tar.gz")} == {
        str(f) for f in range(1, FORMAT_ALONE)
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../out", tarfile.REGTYPE), ("/tmp/out", tarfile.REGTYPE), ("out", tarfile.SYMTYPE), ("out", tarfile.FIFOTYPE)],
)
def test_an_archive_writes_nothing_but_files_below_its_folder(tmp_path: Path, name: str, kind: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(member)
    with tarfile.open(tmp_path / "a.tar") as archive, pytest.raises(ValueError, match="neither a file nor a folder"):
        extract(archive, tmp_path / "into")
    assert not list(tmp_path.glob("**/out"))


@pytest.fixture(params=[str(version) for version in range(1, FORMAT_ALONE)])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    with tarfile.open(FORMATS / f"{request.param}.tar.gz") as archive:
        extract(archive, tmp_path)
    assert json.loads((tmp_path / "store" / "KIVI").read_text())["format"] == int(request.param)
    return tmp_path / "store", json.loads((FORMATS / f"{request.param}.json").read_text())


def test_an_older_store_opens_with_the_same_answers(older: tuple[Path, dict[str, Any]]) -> None:
    path, expected = older
    for _ in range(2):  # and again, with what this version has written
        with kivi.open(path, stage_ttl_s=10**9) as db:
            with db.snapshot(as_of=expected["ts"]) as snapshot:
                assert snapshot.to_arrow("calls").num_rows == expected["calls"]
                assert rows(snapshot, "accounts") == expected["accounts"]
            with db.snapshot(as_of=expected["at"]) as snapshot:
                assert rows(snapshot, "accounts") == expected["before"]
            assert db.outcome("first") is not None
            assert {token: db.outcome(token) for token in expected.get("tokens", ())} == expected.get("tokens", {})
            db.consolidate()
            db.store.settle()
            assert db.stats()["settling"] == 0 < db.stats()["settled_files"]
    with kivi.open(path, stage_ttl_s=10**9) as db:
        with db.snapshot() as snapshot:
            for table in expected.keys() & {"by_endpoint", "by_slot"}:
                assert rows(snapshot, table) == expected[table]
        with db.transaction(batch=("spark/calls/app", 1)) as tx:
            tx.append_stages("calls", [bytes.fromhex(expected["stage"])])
        assert tx.commit_ts is not None and tx.commit_ts > expected["ts"]
        with db.snapshot() as snapshot:
            assert snapshot.to_arrow("calls").num_rows == expected["calls"] + 100
    assert json.loads((path / "KIVI").read_text())["format"] == FORMAT_ALONE


def test_an_older_store_settles_by_itself(older: tuple[Path, dict[str, Any]]) -> None:
    """R23: what lay in blocks moves to files in the background, and every snapshot answers as before."""
    path, expected = older
    soon = {"fold_every_s": 0.02, "settle_every_s": 0.02, "settle_idle_s": 0.0}
    with kivi.open(path, stage_ttl_s=10**9, settle=True, **soon) as db:
        wait_until(lambda: db.stats()["settling"] == 0 < db.stats()["settled_files"], reason=lambda: db.stats())
        with db.snapshot(as_of=expected["ts"]) as snapshot:
            assert snapshot.to_arrow("calls").num_rows == expected["calls"] <= db.stats()["settled_rows"]
            assert rows(snapshot, "accounts") == expected["accounts"]
    assert list((path / "events").rglob("*.parquet"))


def kept_with_keys(path: Path) -> set[bool]:
    """Of the base rows of a closed store, as they lie in its engine; nothing else is kept so."""
    engine = RocksEngine(str(path / "engine"))
    first = space_prefix(Space.ROW)
    found = {value.endswith(key) for key, value in engine.scan(first, prefix_end(first))}
    others = [(key, value) for key, value in engine.scan(b"", None) if key[:1] != first]
    assert Space.VERSION in {key[0] for key, _ in others}
    assert not any(value.endswith(key) for key, value in others)
    engine.close()
    return found


def test_rows_are_kept_with_their_keys_where_all_of_them_are(
    older: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A store that an older version made keeps them as they were: what is written later, and what is copied, too."""
    made = tmp_path / "made"
    kivi.open(made).close()
    format_of = json.loads((older[0] / "KIVI").read_text())["format"]
    for path, with_keys in ((older[0], format_of >= 3), (made, True)):
        with kivi.open(path) as db:
            key = {"id": "int64", "of": "string"}
            db.create_table("more", key=key, columns={"n": kivi.sum("int64")}, history="10000d")
            for _ in range(2):
                with db.transaction() as tx:
                    for i in range(2_000):
                        tx.delta("more", (i, "x" * (i % 5)), n=i)
                db.consolidate()
            with db.snapshot() as snapshot:
                assert snapshot.to_arrow("more")["n"].to_pylist() == [2 * i for i in range(2_000)]
                assert snapshot.get("more", (7, "xx"), ["n"]) == {"n": 14}
                last = list(snapshot.scan("more", prefix=(1_999,), reverse=True, limit=5))
                assert last == [{"id": 1_999, "of": "xxxx", "n": 3_998}]
            db.checkpoint(str(path) + ".copy")
        for directory in (path, Path(str(path) + ".copy")):
            assert kept_with_keys(directory) == {with_keys}


def test_a_newer_store_is_refused_untouched(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data") as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
    marker = tmp_path / "data" / "KIVI"
    marker.write_text(marker.read_text().replace(f'"format": {FORMAT_ALONE}', f'"format": {FORMAT + 1}'))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "LOCK"}
    with pytest.raises(kivi.FormatTooNew, match=f"format {FORMAT + 1}"):
        kivi.open(tmp_path / "data")
    assert {path: path.stat().st_mtime_ns for path in before} == before
