"""A checkpoint while light passes fold rows: the copy's base has nothing later than its position."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import kivi


class Interrupted:
    """The passes' mutex; whenever it is let go, a commit and a light pass come before anybody else gets it."""

    def __init__(self, mutex: threading.Lock, between: Any) -> None:
        self._mutex = mutex
        self._between = between
        self._busy = False

    def __enter__(self) -> None:
        self._mutex.acquire()

    def __exit__(self, *_: object) -> None:
        self._mutex.release()
        if not self._busy:
            self._busy = True
            self._between()
            self._busy = False


def test_a_checkpoint_has_no_row_of_a_later_moment(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "store", background=False) as db:
        db.create_table("bank", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.put("bank", (1,), balance=100)
            tx.put("bank", (2,), balance=100)
        consolidator: Any = db.store.consolidator

        def transfer() -> None:
            with db.transaction() as tx:
                tx.delta("bank", (1,), balance=-1)
                tx.delta("bank", (2,), balance=1)
            consolidator.run_light()

        mutex = consolidator.mutex
        consolidator.mutex = Interrupted(mutex, transfer)
        db.checkpoint(str(tmp_path / "copy"))
        consolidator.mutex = mutex
        with db.snapshot() as snap:
            row = snap.get("bank", (1,))
        assert row is not None
        assert row["balance"] < 100
    with kivi.open(tmp_path / "copy", background=False) as again, again.snapshot() as snap:
        rows = {row["id"]: row["balance"] for row in snap.scan("bank")}
        assert set(rows) == {1, 2}
        assert sum(rows.values()) == 200
