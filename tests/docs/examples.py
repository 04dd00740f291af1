"""The examples of the documentation, run as a reader would run them.

A page's blocks run in their order, in one empty directory, in one Python and with the servers that the page starts:

=================== ===========================================================================================
```` ```python ````   runs in the page's Python; a top-level ``await`` is allowed
```` ```shell ````    commands, one after the other; what fails fails the page
```` ```console ````  commands behind ``$`` and what they print, which is compared
```` ```text output`` what the block before it prints, compared; of other ``text`` nothing is asked
=================== ===========================================================================================

Comparing, ``...`` stands for anything. A command that does not end by itself (``ENDLESS``) goes on in the background: a
server until the page ends, any other until what it is to print is there. Ports are replaced by free ones, and the
defaults of the command line told so, so that pages can run side by side. What cannot run is in ``EXCEPTIONS``, with
the reason; an exception that no page needs any more is an error, and so is a block whose language is not known here.
"""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.forkserver import Forked
from tests.ports import Port

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {*ROOT.glob("*soak-report.md")})
RUN = ("python", "shell", "console")
SHOWN = ("text", "toml", "json", "yaml", "ini", "sql", "make", "typescript")
ENDLESS = ("kivi serve", "kivi watch")
PORTS = (7420, 7421, 7430, 9464, 4317)


@dataclass(frozen=True)
class Exempt:
    """A command, or a statement of Python, that is not run; ``instead`` may be run in its place."""

    page: str
    begins: str
    why: str
    instead: str = ""


EXCEPTIONS = (
    Exempt("docs/howto/several-nodes.md", "pip install", "the tests run in an environment that has it"),
    Exempt(
        "docs/howto/several-nodes.md",
        "kivi serve --cluster",
        "tests/cluster/test_peers.py and test_served.py start three, each way",
    ),
    Exempt(
        "docs/howto/several-nodes.md",
        "kivi cluster adopt",
        "tests/cluster/test_operation.py makes a cluster of a store",
    ),
    Exempt(
        "docs/howto/several-nodes.md",
        "db = kivi.connect(",
        "tests/cluster/test_served.py connects to three and kills each",
    ),
    Exempt("README.md", "make test", "this is a part of it"),
    Exempt(
        "README.md", "make demo", "tests/docs/test_demo.py runs it, in CI, and compares what it prints with the page"
    ),
    Exempt("docs/tutorial.md", "make venv", "the tests run in the environment that it makes"),
    Exempt("docs/tutorial.md", ". .venv/bin/activate", "so the commands are on the path already"),
    Exempt(
        "docs/howto/spark.md",
        'spark = kivi.spark.session("app", **{"spark.jars.packages"',
        "Spark would download the connector; the session is the one from the beginning of the page",
    ),
    Exempt(
        "docs/howto/spark.md",
        'records = (spark.readStream.format("kafka")',
        "there is no Kafka; a folder of files has the shape of its records, as in tests/spark/test_kafka.py",
        instead="records = topic_of_files(spark)",
    ),
    Exempt(
        "docs/howto/spark.md",
        "spark-submit --master spark://HOST:7077",
        "there is no cluster; tests/spark/test_cluster.py takes the two commands from the page and runs them on one",
    ),
    Exempt(
        "docs/howto/spark.md",
        "python -m zipfile -c kivi.zip kivi",
        "it is for the checkout's folder; tests/spark/test_cluster.py runs it",
    ),
    Exempt(
        "docs/howto/run-a-server.md",
        "docker ",
        "there is no engine; tests/ops/test_docker.py builds what is in the image",
    ),
)


@dataclass
class Block:
    """One fenced block: ``line`` is that of its first line of content."""

    page: Path
    line: int
    language: str
    text: str
    output: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> Iterator[tuple[int, str, str, bool]]:
    """(line, info, text, whether nothing but space lies between it and the block before)."""
    lines = page.read_text().splitlines()
    adjacent, at = False, 0
    while at < len(lines):
        opening = re.match(r"(\s*)(`{3,})([^`]*)$", lines[at])
        if opening is None:
            adjacent = adjacent and not lines[at].strip()
            at += 1
            continue
        indent, ticks, info = opening.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks)
        text = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        yield at + 2, info.strip(), text + "\n", adjacent
        adjacent, at = True, end + 1


def blocks(page: Path) -> list[Block]:
    """Those that run, each with the output that is said of it."""
    found: list[Block] = []
    for line, info, text, adjacent in fences(page):
        language = info.split(" ")[0]
        if info == "text output":
            assert adjacent and found and found[-1].output is None, f"{page}:{line}: whose output is this?"
            found[-1].output = text
        elif language in RUN:
            found.append(Block(page, line, language, text))
        else:
            assert language in SHOWN or language.startswith("{"), f"{page}:{line}: what is a block of {info!r}?"
    return found


def commands(text: str) -> Iterator[str]:
    """Shell commands: lines, with those that go on behind a backslash or a here-document."""
    lines = iter(text.splitlines())
    for line in lines:
        command = line
        if match := re.search(r"<<-?\s*'?(\w+)'?", line):
            for more in lines:
                command += f"\n{more}"
                if more.strip() == match[1]:
                    break
        while command.endswith("\\"):
            command += "\n" + next(lines)
        if command.strip() and not command.lstrip().startswith("#"):
            yield command


def dialogue(text: str) -> Iterator[tuple[str, str]]:
    """Of a ``console`` block: each command, and what it prints."""
    command, output = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, "\n".join(output)
            command, output = line[2:], []
        elif line.startswith("> ") and command and not output:
            command += f"\n{line[2:]}"
        else:
            assert command, f"a console block begins with a command, not with {line!r}"
            output.append(line)
    yield command, "\n".join(output)


def is_as_said(wanted: str, found: str) -> bool:
    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"

    return doctest.OutputChecker().check_output(lines(wanted), lines(found), doctest.ELLIPSIS)


class Failed(AssertionError):
    """An example does not do what the page says."""


@dataclass
class Running:
    """A command in the background, and what it prints."""

    command: str
    process: subprocess.Popen[str]
    printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.printed.extend(self.process.stdout)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Page:
    """What the blocks of one page share. ``used`` collects the exceptions that it needed."""

    def __init__(self, page: Path, folder: Path, timeout_s: float = 90.0) -> None:
        self.name = str(page.relative_to(ROOT))
        self.folder = folder
        self.used = set[Exempt]()
        self._timeout_s = timeout_s
        self._held = {port: Port() for port in PORTS}
        self._ports = {port: held.number for port, held in self._held.items()}
        self._running: list[Running] = []
        self._python: Interpreter | None = None
        home = folder.parent / f"{folder.name}-home"
        home.mkdir()
        scripts = sysconfig.get_path("scripts")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KIVI_")},
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "120",
            "KIVI_ENDPOINT": f"localhost:{self._ports[7420]}",
            "KIVI_LISTEN": f"localhost:{self._ports[7420]}",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.close()
        for each in reversed(self._running):
            each.end()

    def run(self, block: Block) -> None:
        """Raises Failed."""
        if block.language == "python":
            self._compare(block, block.text, block.output, self._run_python(block))
        elif block.language == "shell":
            every = list(commands(block.text))
            printed = [self._run_command(block, c, block.output if c is every[-1] else None) for c in every]
            self._compare(block, block.text, block.output, "".join(each or "" for each in printed))
        else:
            for command, output in dialogue(block.text):
                self._compare(block, command, output or None, self._run_command(block, command, output or None))

    def _compare(self, block: Block, what: str, wanted: str | None, found: str | None) -> None:
        if wanted is not None and found is not None and not is_as_said(wanted, found):
            raise Failed(f"{block.where}: {what}\n--- the page says\n{wanted}\n--- it printed\n{found}")

    def _exempt(self, text: str) -> Exempt | None:
        for each in EXCEPTIONS:
            if each.page == self.name and text.lstrip().startswith(each.begins):
                self.used.add(each)
                return each
        return None

    def _with_ports(self, text: str) -> str:
        return re.sub(r"(?<=:)(\d{4})\b", lambda m: str(self._ports.get(int(m[1]), m[1])), text)

    def _without_ports(self, text: str) -> str:
        for said, real in self._ports.items():
            text = text.replace(f":{real}", f":{said}")
        return text

    # -- Python ---------------------------------------------------------------------------------

    def _run_python(self, block: Block) -> str:
        if self._python is None:
            self._python = Interpreter(self.folder, self._environment)
        printed = []
        for line, statement in statements(block.text):
            exempt = self._exempt(statement)
            code = self._with_ports(statement) if exempt is None else exempt.instead
            output, error = self._python.run(code, str(block.page), block.line + line, self._timeout_s)
            printed.append(output)
            if error:
                raise Failed(f"{block.where}\n{''.join(printed)}\n{error}")
        return self._without_ports("".join(printed))

    # -- commands -------------------------------------------------------------------------------

    def _run_command(self, block: Block, command: str, wanted: str | None) -> str | None:
        """What it printed; None if it was not run."""
        if self._exempt(command):
            return None
        if match := re.fullmatch(r"export (\w+)=(.*)", command):
            self._environment[match[1]] = shlex.split(self._with_ports(match[2]))[0]
            return ""
        if command.startswith(ENDLESS) and "--print-settings" not in command:
            return self._start(block, command, wanted)
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", self._with_ports(command)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{block.where}: {command}\ndoes not end: {error.output!r}") from None
        if done.returncode != 0 and not (wanted and is_as_said(wanted, self._without_ports(done.stdout))):
            raise Failed(f"{block.where}: {command}\nexit code {done.returncode}\n{done.stdout}")
        return self._without_ports(done.stdout)

    def _start(self, block: Block, command: str, wanted: str | None) -> str:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {self._with_ports(command)}"],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running = Running(command, process)
        self._running.append(running)
        serves = command.startswith("kivi serve")
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            printed = self._without_ports("".join(running.printed))
            is_there = is_as_said(wanted, printed) if wanted else bool(printed)
            if is_there and (not serves or "listening on" in printed):
                if not serves:
                    running.end()
                return printed
            if process.poll() is not None:
                break
            time.sleep(0.02)
        raise Failed(
            f"{block.where}: {command}\n--- the page says\n{wanted}\n--- it printed\n{''.join(running.printed)}"
        )


def statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a block, each with its line (from 0) and, before it, its comments."""
    import ast

    lines, begin = text.splitlines(), 0
    for node in ast.parse(text).body:
        end = node.end_lineno or 1
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        yield first, "\n".join(lines[first:end])
        begin = end
    assert begin or not text.strip() or all(line.lstrip().startswith("#") for line in lines if line.strip())


class Interpreter:
    """A Python of its own that runs what it is sent, one block after the other, in one namespace."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        to_child, ours = os.pipe()
        theirs, from_child = os.pipe()
        self._log = folder.parent / f"{folder.name}-python.log"
        self._process = Forked(
            "tests.docs.interpreter", [str(folder), str(self._log)], environment, [to_child, from_child]
        )
        os.close(to_child)
        os.close(from_child)
        self._requests = os.fdopen(ours, "w")
        self._answers = os.fdopen(theirs)

    def run(self, code: str, page: str, line: int, timeout_s: float) -> tuple[str, str]:
        """What it printed, and the traceback if it failed."""
        timer = threading.Timer(timeout_s, self._process.send_signal, [signal.SIGKILL])
        timer.start()
        try:
            json.dump({"code": code, "page": page, "line": line}, self._requests)
            self._requests.write("\n")
            self._requests.flush()
            answer = self._answers.readline()
        finally:
            timer.cancel()
        if not answer:
            self._process.wait()
            return "", f"the Python ended, or took more than {timeout_s:g} s:\n{self._log.read_text(errors='replace')}"
        said: dict[str, Any] = json.loads(answer)
        return str(said["output"]), str(said["error"])

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._process.stdout.close()
