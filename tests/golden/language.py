"""The language of the golden histories: what each command does and prints.

A script is a text of blocks: commands, ``---``, the output that they must produce, an empty line. ``#`` begins a
comment. ``UPDATE_GOLDEN=1 pytest tests/golden`` writes the output anew: read the diff. A command is

    [session:] verb [table] [key] [column=value ...]

A *session* is a transaction or a snapshot with a name. Without one, a write is a transaction of its own and a read
looks at a snapshot of its own. Values are numbers, "texts", null, true, false and moments (17:50:03 or 17:50, of one
fixed day); a key is its values with commas between them. **Timestamps are counted from the last mark**: @1 is the first
commit after it, and an abort record takes a number too.

  schema      table NAME key=COL:TYPE,... COL:TYPE|COL:sum(TYPE) ... [history=1h]
              events NAME time=COL COL:TYPE ...
              aggregate NAME of=EVENTS by=COL,SLOT:COL/5m NAME:sum(COL) ... [derived=NAME:expression]
              with measures such as NAME:top(COL,k=2,most=3) and NAME:count(where=COL<op>VALUE)
              drop NAME
  session     t: begin [token=TEXT] [batch=SCOPE/N]       prints its snapshot
              t: commit | t: rollback
              t: commit held        enters the log, is durable, and stands still between its CTS and its finish
              finish t | abort t    lets a held commit finish, or aborts it; prints everybody who is acknowledged now
              r: snapshot [at=N]    a read-only view of now, or as of N
              r: close
  reads       get T KEY [columns=a,b]                     scan T [prefix=KEY] [where=COL<op>VALUE] [columns=a,b]
  writes      put | insert | delta T KEY COL=VALUE ...    delete T KEY    guard T KEY [COL]
              append T COL=VALUE ...                      one event
  store       consolidate           folds everything visible, then sweeps what nobody needs
              crash | reopen        whoever was waiting for a commit hears nothing of it; one who outlives the store (a
                                    client of a server) asks by its token after the restart, and must be told the
                                    timestamp it was held at. The lines are the same, the check is in addition
              wait 61s              moves the clock of leases and history
              mark                  timestamps are counted from the watermark of now
              watermark | outcome TOKEN
              dump T [T ...]        what is stored: base rows, versions, tombstones, blocks, then pending operations
              # ...                 a remark

Lines of a dump begin with ``|``. They say *where* a fact lies, not what is true, so they are compared only where
consolidation runs as the script says (and after a crash only in memory, where a crash loses the unflushed base for
certain); every other line must be the same in every variant.
"""

from __future__ import annotations

import datetime as dt
import operator
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import kivi
from kivi.delta.runs import DeltaRun
from kivi.encoding import pretty as fmt
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix
from kivi.errors import Conflict, KiviError, Retryable, RowExists
from kivi.model.outcomes import NoCommit
from kivi.model.schema import TableSchema
from kivi.store.catalog import SYSTEM
from tests.golden.driver import Driver

__all__ = ["Runner", "run_script", "without_dumps"]

_DAY = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
_MOMENT = re.compile(r"(\d\d):(\d\d)(?::(\d\d))?\Z")
_WORD = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*")+')
_COMPARED = re.compile(r"(\w+)(<=|>=|==|<|>)(.+)\Z")
_EVER = 2**62


class Stamps:
    """Timestamps as scripts print them: from the mark, without the numbers that a restart skips."""

    def __init__(self) -> None:
        self._mark = 0
        self._epochs: list[tuple[int, int]] = [(0, 0)]  # (first CTS, what was skipped up to it)
        self._restarted_at: int | None = None
        self.last = 0

    def restarted(self, last: int) -> None:
        self.last = max(last, self.last)
        self._restarted_at = self.last if self._restarted_at is None else self._restarted_at

    def entered(self, cts: int) -> None:
        """A record entered the log. The first after a restart tells how many numbers were skipped."""
        assert cts > self.last, f"R13: {cts} was handed out after {self.last}"
        self.last = cts
        last = self._restarted_at
        if last is not None:
            self._restarted_at = None
            self._epochs.append((cts, self._epochs[-1][1] + cts - last - 1))

    def set_mark(self, ts: int) -> None:
        self._mark += self.label(ts)

    def label(self, ts: int) -> int:
        _, skipped = next(epoch for epoch in reversed(self._epochs) if epoch[0] <= ts)
        following = next((epoch for epoch in self._epochs if epoch[0] > ts), None)
        label = ts - skipped
        if following is not None:
            label = min(label, following[0] - following[1] - 1)
        elif self._restarted_at is not None:
            label = min(label, self._restarted_at - skipped)
        return label - self._mark

    def text(self, ts: int) -> str:
        return str(self.label(ts))

    def ts(self, label: int) -> int:
        for first, skipped in reversed(self._epochs):
            if (ts := label + self._mark + skipped) >= first:
                return ts
        return label + self._mark


@dataclass
class Session:
    """A named transaction or snapshot; ``waiting`` while its commit is held."""

    name: str
    handle: Any
    thread: threading.Thread | None = None
    held: int = 0
    outcome: list[Any] = field(default_factory=list)

    def commit_in_thread(self) -> None:
        def work() -> None:
            try:
                self.outcome.append(self.handle.commit())
            except KiviError as error:
                self.outcome.append(error)

        self.thread = threading.Thread(target=work, name=f"golden-{self.name}", daemon=True)
        self.thread.start()


class Runner:
    """Executes commands; each returns the lines it prints."""

    def __init__(self, driver: Driver, *, forced: bool = False, light: bool = False) -> None:
        self.driver = driver
        self.forced = forced
        self.light = light
        self.crashed = False
        self.stamps = Stamps()
        self.sessions: dict[str, Session] = {}

    def block(self, commands: list[str]) -> list[str]:
        out: list[str] = []
        for command in commands:
            bare = _without_comment(command)
            if bare:
                out += self.command(bare)
                if self.forced:
                    self._consolidate()
                if self.light:
                    self._settle()
                    self.driver.store.consolidator.run_light()
        return out or ["ok"]

    def command(self, text: str) -> list[str]:
        name = ""
        if match := re.match(r"(\w+):\s+(.*)", text):
            name, text = match[1], match[2]
        words = _WORD.findall(text)
        says = f"{name}: " if name else ""
        try:
            lines = list(self._do(name, words[0], words[1:]))
        except KiviError as error:
            lines = [self._error(error)]
        self.stamps.last = max(self.stamps.last, self.driver.store.log.last)
        return [line if line.startswith("|") else says + line for line in lines]

    def _do(self, name: str, verb: str, words: list[str]) -> Iterator[str]:
        method: Callable[..., Iterator[str]] | None = getattr(self, f"do_{verb}", None)
        if method is None:
            raise AssertionError(f"the golden language has no command {verb!r}")
        plain, named = _arguments(words)
        yield from method(name, plain, named)

    def _error(self, error: KiviError) -> str:
        match error:
            case Conflict():
                cell = f"{error.table}({', '.join(_shown(v) for v in error.key)})"
                cell += f".{error.column}" if error.column else ""
                won = "a commit in flight" if error.commit_ts is None else f"@{self.stamps.text(error.commit_ts)}"
                return f"Conflict on {cell}, written by {won}"
            case RowExists():
                return f"RowExists {error.table}({', '.join(_shown(v) for v in error.key)})"
            case Retryable():
                return "Aborted"  # given up or fenced off; over the wire, and to a caller, it has no narrower name
            case _:
                return type(error).__name__

    # -- schema ---------------------------------------------------------------------------------

    def do_table(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        key = dict(_typed(word) for word in named["key"].split(","))
        columns = dict(_typed(word) for word in words[1:])
        self.driver.db.create_table(words[0], key=key, columns=columns, history=named.get("history"))
        yield from ()

    def do_events(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.driver.db.create_event_table(
            words[0], event_time=named["time"], columns=dict(_typed(word) for word in words[1:])
        )
        yield from ()

    def do_aggregate(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        group_by: list[Any] = []
        for part in named["by"].split(","):
            slot, colon, of = part.partition(":")
            column, _, width = of.partition("/")
            group_by.append(kivi.time_slot(column, width, name=slot) if colon else part)
        derived = dict([named["derived"].split(":", 1)]) if "derived" in named else None
        measures = {}
        for word in words[1:]:
            measure, call = word.split(":", 1)
            maker, _, given = call.removesuffix(")").partition("(")
            arguments, options = _arguments(given.split(",") if given else [])
            measures[measure] = getattr(kivi, maker)(*arguments, **{n: _option(n, v) for n, v in options.items()})
        self.driver.db.create_aggregate(
            words[0], source=named["of"], group_by=group_by, measures=measures, derived=derived
        )
        yield from ()

    def do_drop(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.driver.db.drop(words[0])
        yield from ()

    # -- sessions -------------------------------------------------------------------------------

    def do_begin(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        batch = None
        if "batch" in named:
            scope, _, sequence = named["batch"].partition("/")
            batch = (scope, int(sequence))
        tx = self.driver.db.transaction(token=named.get("token"), batch=batch).__enter__()
        self.sessions[name] = Session(name, tx)
        yield f"begins at {self.stamps.text(tx.start_ts)}"

    def do_snapshot(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        as_of = self.stamps.ts(int(named["at"])) if "at" in named else None
        snap = self.driver.db.snapshot(as_of=as_of).__enter__()
        self.sessions[name] = Session(name, snap)
        yield f"sees {self.stamps.text(snap.ts)}"

    def do_close(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.sessions.pop(name).handle.close()
        yield from ()

    def do_rollback(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.sessions.pop(name).handle.rollback()
        yield from ()

    def do_commit(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        session = self.sessions[name]
        if words == ["held"]:
            yield self._commit_held(session)
            return
        del self.sessions[name]
        yield self._committed(session.handle.commit())

    def _committed(self, commit_ts: int, *, held: bool = False) -> str:
        if self.driver.store.log.last > self.stamps.last and not held:
            self.stamps.entered(commit_ts)  # else a repeated token, or nothing was written
        return f"committed @{self.stamps.text(commit_ts)}"

    def _commit_held(self, session: Session) -> str:
        committer = self.driver.store.committer
        before = set(committer.held)
        committer.hold = lambda commit: True
        session.commit_in_thread()
        assert session.thread is not None
        while not (new := set(committer.held) - before) and session.thread.is_alive():
            session.thread.join(0.0005)
        committer.hold = None
        if not new:
            del self.sessions[session.name]
            return self._outcome_of(session)
        (session.held,) = new
        self.stamps.entered(session.held)
        return f"holds @{self.stamps.text(session.held)}"

    def _outcome_of(self, session: Session) -> str:
        outcome = session.outcome[0]
        if isinstance(outcome, KiviError):
            return self._error(outcome)
        return self._committed(outcome, held=session.held > 0)

    def do_finish(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        session = self.sessions[words[0]]
        self.driver.store.committer.finish_held(session.held)
        yield from self._acknowledged(session)

    def do_abort(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        session = self.sessions[words[0]]
        self.driver.store.committer.abort_held(session.held)
        yield from self._acknowledged(session)

    def _acknowledged(self, finished: Session) -> Iterator[str]:
        """Everybody whose commit the watermark has passed, in commit order."""
        watermark = self.driver.store.watermark()
        waiting = [s for s in self.sessions.values() if s.held and s.held <= watermark]
        if finished not in waiting:
            yield f"{finished.name}: finished @{self.stamps.text(finished.held)}, not acknowledged yet"
        for session in sorted(waiting, key=lambda s: s.held):
            assert session.thread is not None
            session.thread.join(60)
            assert session.outcome, f"{session.name} is not acknowledged, and the watermark is past its commit"
            del self.sessions[session.name]
            yield f"{session.name}: {self._outcome_of(session)}"

    # -- reads ----------------------------------------------------------------------------------

    @contextmanager
    def _reader(self, name: str) -> Iterator[Any]:
        if name:
            yield self.sessions[name].handle
        else:
            with self.driver.db.snapshot() as snap:
                yield snap

    def do_get(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        key = _key(words[1])
        columns = named["columns"].split(",") if "columns" in named else None
        with self._reader(name) as reader:
            found = reader.get(words[0], key, columns=columns)
        where = f"{words[0]}({', '.join(_shown(v) for v in key)})"
        if found is None:
            yield f"{where} is not there"
        else:
            yield f"{where} {_row(found, self._keys(words[0]))}".rstrip()

    def do_scan(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        where = _predicate(named["where"]) if "where" in named else None
        prefix = _key(named["prefix"]) if "prefix" in named else ()
        columns = named["columns"].split(",") if "columns" in named else None
        with self._reader(name) as reader:
            rows = list(reader.scan(words[0], prefix=prefix, where=where, columns=columns))
        keys = self._keys(words[0])
        for row in rows:
            key = ", ".join(_shown(row[k]) for k in keys if k in row)
            yield f"{words[0]}({key}) {_row(row, keys)}".rstrip()
        if not rows:
            yield f"{words[0]}: no rows"

    def _keys(self, table: str) -> list[str]:
        return list(self.driver.db.describe(table)["key"])

    # -- writes ---------------------------------------------------------------------------------

    def _write(self, name: str, call: Callable[[Any], None]) -> Iterator[str]:
        if name:
            call(self.sessions[name].handle)
            return
        with self.driver.db.transaction() as tx:
            call(tx)
        yield self._committed(tx.commit_ts)

    def do_put(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        return self._write(name, lambda tx: tx.put(words[0], _key(words[1]), **_values(named)))

    def do_insert(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        return self._write(name, lambda tx: tx.insert(words[0], _key(words[1]), **_values(named)))

    def do_delta(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        return self._write(name, lambda tx: tx.delta(words[0], _key(words[1]), **_values(named)))

    def do_delete(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        return self._write(name, lambda tx: tx.delete(words[0], _key(words[1])))

    def do_guard(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        column = words[2] if len(words) > 2 else None
        return self._write(name, lambda tx: tx.guard(words[0], _key(words[1]), column))

    def do_append(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        return self._write(name, lambda tx: tx.append(words[0], [_values(named)]))

    # -- the store ------------------------------------------------------------------------------

    def _settle(self) -> None:
        committing = sum(session.held > 0 for session in self.sessions.values())
        self.driver.settle(len(self.sessions) - committing, committing)

    def _consolidate(self) -> None:
        self._settle()
        store = self.driver.store
        store.consolidate()
        store.consolidator.flush()
        store.consolidator.sweep()
        store.consolidator.compact()

    def do_consolidate(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self._consolidate()
        yield from ()

    def _restart(self, how: Callable[[], None]) -> Iterator[str]:
        self.stamps.restarted(self.driver.store.log.last)
        waiting = sorted((s for s in self.sessions.values() if s.held), key=lambda s: s.held)
        for session in waiting:
            yield f"{session.name}: hears nothing of @{self.stamps.text(session.held)}"
        self.sessions.clear()
        how()
        for session in waiting if self.driver.outlives else ():
            assert session.thread is not None
            session.thread.join(60)
            told = session.outcome or ["nothing"]
            assert told == [session.held], f"{session.name} held {session.held}, and after the restart was told {told}"

    def do_crash(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.crashed = True
        yield from self._restart(self.driver.crash)

    def do_reopen(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        yield from self._restart(self.driver.reopen)

    def do_wait(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.driver.wait(float(words[0].removesuffix("s")))
        yield from ()

    def do_mark(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        self.stamps.set_mark(self.driver.store.watermark())
        yield from ()

    def do_watermark(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        yield f"watermark {self.stamps.text(self.driver.db.watermark())}"

    def do_outcome(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        found = self.driver.db.outcome(words[0])
        yield f"{words[0]}: {found.value if isinstance(found, NoCommit) else f'committed @{self.stamps.text(found)}'}"

    def do_dump(self, name: str, words: list[str], named: dict[str, str]) -> Iterator[str]:
        store = self.driver.store
        for table in words:
            schema = store.table(table)
            stored = [
                fmt.entry(key, data, self._schema_of, self.stamps.text)
                for space in (Space.ROW, Space.VERSION, Space.TOMBSTONE, Space.EVENT)
                for key, data in store.engine.scan(space_prefix(space), prefix_end(space_prefix(space)))
                if fmt.table_of(key) == schema.id
            ]
            waiting = list(self._pending(schema))
            for line in [*stored, *waiting] or [f"nothing stored for {table}"]:
                yield f"| {line}"

    def _schema_of(self, table: int) -> TableSchema | None:
        return SYSTEM.get(table) or self.driver.store.catalog.schema_of(table)

    def _pending(self, schema: TableSchema) -> Iterator[str]:
        store = self.driver.store
        rows, runs = store.pending.capture(schema.id, None, None, _EVER)
        operations = [(key, cts, op.barrier.name, op.puts, op.deltas) for key, ops in rows for cts, op in ops]
        operations += [op for run in runs for op in _run_operations(run)]
        watermark = store.watermark()
        for key, cts, barrier, puts, deltas in sorted(operations, key=lambda item: item[:2]):
            shown = fmt.operation(schema, key, barrier, puts, deltas, cts, self.stamps.text)
            yield f"pending    {shown}{'  (not visible yet)' if cts > watermark else ''}"
        for item in store.pending.events(schema.id, _EVER):
            hidden = "  (not visible yet)" if item.last > watermark else ""
            yield f"pending    {schema.name} @{self.stamps.text(item.last)}  {item.batch.num_rows} events{hidden}"


def _run_operations(run: DeltaRun) -> Iterator[tuple[bytes, int, str, dict[int, Any], Any]]:
    for i in range(run.rows):
        yield run.key_at(i), run.cts_at(i), "PATCH", {}, run.deltas_at(i)


# -- words ------------------------------------------------------------------------------------------


def _without_comment(line: str) -> str:
    """The line up to a ``#`` that is outside quotes."""
    quoted = False
    for i, char in enumerate(line):
        if char == '"':
            quoted = not quoted
        elif char == "#" and not quoted:
            return line[:i].strip()
    return line.strip()


def _arguments(words: list[str]) -> tuple[list[str], dict[str, str]]:
    plain: list[str] = []
    named: dict[str, str] = {}
    for word in words:
        match = re.match(r"([A-Za-z_]\w*)=(?!=)(.*)\Z", word)
        if match:
            named[match[1]] = match[2]
        else:
            plain.append(word)
    return plain, named


def _typed(word: str) -> tuple[str, Any]:
    """``n:sum(int64)`` -> ("n", kivi.sum("int64"))."""
    name, _, declared = word.partition(":")
    if match := re.match(r"(sum|min|max|count)\((.*)\)\Z", declared):
        return name, getattr(kivi, match[1])(*([match[2]] if match[2] else []))
    return name, declared


def _option(name: str, word: str) -> Any:
    return word if name == "by" else _predicate(word) if name == "where" else _value(word)


def _predicate(word: str) -> Any:
    """``COL<op>VALUE``"""
    match = _COMPARED.match(word)
    assert match, word
    compare = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt}
    return compare[match[2]](kivi.col(match[1]), _value(match[3]))


def _value(word: str) -> Any:
    word = word.removeprefix("+")
    if word.startswith('"'):
        return word[1:-1]
    if match := _MOMENT.match(word):
        return _DAY + dt.timedelta(hours=int(match[1]), minutes=int(match[2]), seconds=int(match[3] or 0))
    plain = {"null": None, "true": True, "false": False}
    if word in plain:
        return plain[word]
    return int(word) if re.match(r"-?\d+\Z", word) else float(word)


def _values(named: dict[str, str]) -> dict[str, Any]:
    return {name: _value(word) for name, word in named.items()}


def _key(word: str) -> tuple[Any, ...]:
    return tuple(_value(part) for part in word.split(","))


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case str():
            return f'"{value}"'
        case dt.datetime():
            return value.strftime("%H:%M:%S")
        case _:
            return str(value)


def _row(row: dict[str, Any], keys: list[str]) -> str:
    return " ".join(f"{name}={_shown(value)}" for name, value in row.items() if name not in keys)


# -- scripts ----------------------------------------------------------------------------------------


def run_script(text: str, runner: Runner) -> str:
    """The script with the output that ``runner`` produced; a block of nothing but comments stays as it is."""
    out = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        lines = part.split("\n")
        if "---" not in lines:
            assert all(line.startswith("#") for line in lines), f"a block without ---: {lines[0]}"
            out.append(part)
            continue
        commands = lines[: lines.index("---")]
        out.append("\n".join([*commands, "---", *runner.block(commands)]))
    return "\n\n".join(out) + "\n"


def without_dumps(text: str) -> str:
    """The script without the lines that say where facts lie."""
    return "\n".join(line for line in text.split("\n") if not line.startswith("|"))
