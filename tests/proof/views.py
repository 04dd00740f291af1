"""A row table with secondary views, written in every way, and its views read at every kind of snapshot.

Some rows are hot; the others are there so that a view takes several parts to be filled (``tests.proof.crash``).
"""

from __future__ import annotations

from typing import Any

from kivi.errors import CommitUnknown, Conflict, KiviError, RowExists
from tests.oracle import Attempt, Op, Read
from tests.proof.workloads import Client

__all__ = ["PEOPLE", "Viewed", "people"]

HOT = 6
DESKS = 8
PEOPLE = range(100, 200)
TABLES = ("people", "by_name", "by_desk")


def people() -> list[Op]:
    """Rows that are there from the beginning."""
    return [Op("put", "people", (i,), {"name": f"n{i % 7}", "desk": i}) for i in PEOPLE]


class Viewed(Client):
    """Puts that move rows in the views, deltas of what the views carry, inserts and deletes; some of them blind."""

    def step(self) -> None:
        match self.random.random():
            case chance if chance < 0.25:
                self.look()
            case chance if chance < 0.4:
                self.blind()
            case _:
                self.transaction()

    def key(self) -> tuple[int]:
        rng = self.random
        return (rng.randrange(HOT) if rng.random() < 0.8 else rng.choice(PEOPLE),)

    def look(self) -> None:
        """The table and its views at one snapshot, of now or of the past."""
        with self.db.snapshot(min_snapshot=self.acknowledged) as now:
            moment = now.ts
            for table in TABLES:
                self.scan(now, table)
        if self.random.random() < 0.5:
            with self.db.snapshot(as_of=self.random.randint(self.first, moment)) as past:
                for table in TABLES:
                    self.scan(past, table)

    def transaction(self) -> None:
        """One, or two beside each other that write the same row."""
        met = self.key() if self.random.random() < 0.5 else None
        begun = [(self.begin(), list[Op]()) for _ in range(1 if met is None else 2)]
        for (tx, _), ops in begun:
            for key in [met or self.key(), *(self.key() for _ in range(self.random.randrange(3)))]:
                self.write_in(tx, ops, key)
                if self.random.random() < 0.3:
                    self.read_in(tx, ops)
        for (tx, token), ops in begun:
            self.commit(tx, ops, token)

    def write_in(self, tx: Any, ops: list[Op], key: tuple[int]) -> None:
        rng = self.random
        match rng.randrange(8):
            case 0 | 1:
                op = Op("put", "people", key, {"name": rng.choice(["p", "q", None])})
            case 2 | 3:
                op = Op("put", "people", key, {"desk": rng.choice([rng.randrange(DESKS), key[0], None])})
            case 4:
                op = Op("put", "people", key, {"balance": rng.randrange(100)})
            case 5:
                op = Op("delete", "people", key)
            case 6:
                op = Op("insert", "people", key, {"name": "p"})
            case _:
                op = Op("delta", "people", key, {"balance": rng.randrange(-50, 50)})
        try:
            getattr(tx, op.kind)(op.table, op.key, **op.values)
        except RowExists:
            assert op.kind == "insert"
        else:
            ops.append(op)

    def read_in(self, tx: Any, ops: list[Op]) -> None:
        """Of the unique view only what others wrote: what would be refused at the commit is there in no order."""
        rng = self.random
        table = "by_name" if ops else rng.choice(TABLES)
        key: tuple[Any, ...] | None = None
        if rng.random() < 0.5:
            key = {"by_name": (rng.choice("pq"), *self.key()), "by_desk": (rng.randrange(DESKS),)}.get(
                table, self.key()
            )
            found: Any = tx.get(table, key)
        else:
            found = list(tx.scan(table))
        self.oracle.read(Read(tx.start_ts, table, key, found, tuple(ops), self.name))

    def blind(self) -> None:
        """Rows in one message, which reads nothing: it is derived again where another one is before it."""
        rng = self.random
        rows: list[dict[str, Any]] = [
            {"id": key, "name": rng.choice("pq"), "balance": rng.randrange(9)}
            for key in {self.key()[0] for _ in range(rng.randint(1, 3))}
        ]
        if rng.random() < 0.3:
            rows = [{"id": row["id"], "desk": rng.randrange(DESKS), "balance": 1} for row in rows]
        ops = [
            op
            for row in rows
            for op in (
                Op("put", "people", (row["id"],), {c: row[c] for c in ("name", "desk") if c in row}),
                Op("delta", "people", (row["id"],), {"balance": row["balance"]}),
            )
        ]
        token = next(self._tokens)
        attempt = Attempt(None, ops, "unknown", token=token, who=self.name, after=self.acknowledged)
        self.oracle.attempt(attempt)
        try:
            commit_ts = self.db.write("people", rows, token=token)
        except (Conflict, RowExists) as error:
            attempt.outcome = "aborted"
            if isinstance(error, Conflict):
                attempt.refused = error
        except CommitUnknown:
            self.unknown += 1
        except KiviError:
            self.restarted += 1
        else:
            attempt.commit_ts, attempt.outcome = commit_ts, "committed"
            self.acknowledged = max(self.acknowledged, commit_ts)
