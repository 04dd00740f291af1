"""``kivi shell``: transactions by hand, so that two shells side by side show what concurrent ones do.

::

    kivi> begin
    kivi (snapshot 41)> delta accounts 1 balance=21
    kivi (snapshot 41)> get accounts 1
    kivi (snapshot 41)> commit
    committed at 43

Outside a transaction every command is one of its own. Input that is no terminal is a script: no prompt,
and the exit code is 1 if a command failed.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from kivi.cli.text import assignments, key_of, outputs, print_rows, print_value
from kivi.errors import Conflict, InvalidArgument, KiviError
from kivi.model.predicate_text import type_names, where

__all__ = ["Shell"]

HELP: Final = """\
begin                                   a transaction, on a snapshot of now
put T KEY... column=value...            set columns (upsert)
delta T KEY... column=value...          add to delta columns; never conflicts with another delta
insert T KEY... column=value...         a new row; fails if it is there
delete T KEY...                         delete a row
guard T KEY... [column]                 make what was read conflict like a write
get T KEY...                            one row
scan T [PREFIX...] [where PREDICATE]    rows in key order
commit | rollback                       end the transaction
tables | describe T | outcome TOKEN | watermark | consolidate
help | exit"""


class Shell:
    def __init__(self, db: Any, style: str) -> None:
        self.db = db
        self.style = style
        self.tx: Any = None
        self.failed = False
        self.describe: Callable[[str], dict[str, Any]] = functools.cache(db.describe)
        self.commands: dict[str, Callable[[list[str]], None]] = {
            "begin": self.begin,
            "commit": self.commit,
            "rollback": self.rollback,
            **dict.fromkeys(("put", "delta", "insert", "delete"), self.put),
            "guard": self.guard,
            "get": self.get,
            "scan": self.scan,
            "tables": lambda _: print("\n".join(self.db.tables())),
            "describe": lambda words: print_value(self.db.describe(*words[1:2]), self.style),
            "outcome": lambda words: print(self.db.outcome(*words[1:2])),
            "watermark": lambda _: print(self.db.watermark()),
            "consolidate": lambda _: self.db.consolidate(),
            "help": lambda _: print(HELP),
        }

    def run(self) -> int:
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # gives input() line editing and history

            readline.parse_and_bind("tab: complete")
            print("help lists the commands")
        while True:
            try:
                line = input(self.prompt() if interactive else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                print()
                continue
            if line.strip() in ("exit", "quit"):
                break
            self.do(line)
            sys.stdout.flush()
        if self.tx is not None:
            self.tx.rollback()
        return 1 if self.failed and not interactive else 0

    def prompt(self) -> str:
        return "kivi> " if self.tx is None else f"kivi (snapshot {self.tx.start_ts})> "

    def do(self, line: str) -> None:
        """One line; an error is printed, and the shell goes on."""
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            self.fail(f"{error}: check the quotes")
            return
        if not words:
            return
        command = self.commands.get(words[0])
        if command is None:
            self.fail(f"{words[0]!r} is not a command: help lists them")
            return
        try:
            command(words)
        except KiviError as error:
            name = type(error).__name__
            self.fail(f"{name}: {error.message}" if isinstance(error, Conflict) else error.message)
        except TypeError:
            self.fail(f"{words[0]} needs more than that: help lists the commands")

    def fail(self, message: str) -> None:
        self.failed = True
        print(f"error: {message}", file=sys.stderr, flush=True)

    # -- transactions ---------------------------------------------------------------------------

    def begin(self, _: Sequence[str]) -> None:
        if self.tx is not None:
            raise InvalidArgument("a transaction is open: commit or rollback first")
        tx = self.db.transaction()
        tx.__enter__()
        print(f"snapshot {tx.start_ts}")
        self.tx = tx

    def commit(self, _: Sequence[str]) -> None:
        tx, self.tx = self.open(), None
        print(f"committed at {tx.commit()}")

    def rollback(self, _: Sequence[str]) -> None:
        tx, self.tx = self.open(), None
        tx.rollback()
        print("rolled back")

    def open(self) -> Any:
        if self.tx is None:
            raise InvalidArgument("no transaction is open: begin one")
        return self.tx

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """The open transaction, or one for this command."""
        if self.tx is not None:
            yield self.tx
            return
        with self.db.transaction() as tx:
            yield tx
        print(f"committed at {tx.commit_ts}")

    def reading(self) -> AbstractContextManager[Any]:
        """The open transaction, or a snapshot for this command."""
        return self.db.snapshot() if self.tx is None else nullcontext(self.tx)

    # -- commands -------------------------------------------------------------------------------

    def target(self, words: Sequence[str]) -> tuple[dict[str, Any], tuple[Any, ...], list[str]]:
        """``command T KEY... rest`` -> description, key, rest."""
        if len(words) < 2:
            raise InvalidArgument(f"{words[0]} needs a table")
        found = self.describe(words[1])
        end = 2 + len(found["key"])
        return found, key_of(found, words[2:end]), list(words[end:])

    def put(self, words: list[str]) -> None:
        found, key, rest = self.target(words)
        if words[0] == "delete" and rest:
            raise InvalidArgument("delete takes a key and nothing else")
        values = assignments(found, rest)
        with self.writing() as tx:
            getattr(tx, words[0])(words[1], key, **values)

    def guard(self, words: list[str]) -> None:
        _, key, rest = self.target(words)
        self.open().guard(words[1], key, *rest[:1])

    def get(self, words: list[str]) -> None:
        _, key, _ = self.target(words)
        with self.reading() as view:
            row = view.get(words[1], key)
        if row is None:
            print("no such row")
        else:
            print_rows([row], list(row), self.style)

    def scan(self, words: list[str]) -> None:
        if len(words) < 2:
            raise InvalidArgument("scan needs a table")
        found = self.describe(words[1])
        rest, predicate = words[2:], None
        if "where" in rest:
            at = rest.index("where")
            rest, predicate = rest[:at], where(" ".join(rest[at + 1 :]), type_names(found))
        with self.reading() as view:
            rows = view.scan(words[1], prefix=key_of(found, rest, partial=True), where=predicate)
            print_rows(rows, outputs(found, None), self.style)
