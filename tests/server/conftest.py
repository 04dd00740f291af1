"""One server for the tests of this folder that do not end it, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kivi
import kivi.client.database
from tests.server.rawsession import RawSession
from tests.serverproc import ServerProcess


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as running:
        yield running


@pytest.fixture
def db(server: ServerProcess) -> Iterator[kivi.client.Database]:
    with server.connect() as database:
        yield database


@pytest.fixture
def accounts(db: kivi.client.Database) -> str:
    """A fresh row table."""
    if "accounts" in db.tables():
        db.drop("accounts")
    db.create_table(
        "accounts",
        key={"id": "int64"},
        columns={"name": "string", "balance": kivi.sum("int64"), "peak": kivi.max("int64")},
    )
    return "accounts"


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[RawSession]:
    session = RawSession(server.endpoint)
    yield session
    session.close()
