"""The demonstration from start to end: ``run``. What happens is told by the steps it says.

Order: a directory; the server, which has the console; the tables; live traffic through Spark; the real trace through a
Spark that is killed twice; the proof. Every process is ended again, whatever happens, the server last.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import kivi
from apm_demo import endpoints, tables
from apm_demo.children import Child, Failure
from apm_demo.proof import Finding, prove_live, prove_trace
from apm_demo.say import Voice
from apm_demo.trace import SEED, land_trace

__all__ = ["Demo", "Options", "console", "run"]

_MARK: Final = ".kivi-demo"
_FOLDERS: Final = ("logs", "landing/invocations", "landing/trace", "checkpoints", "spark")
_TRACE_PIECES: Final = 15
_KILL_AT: Final = (0.2, 0.6)  # the share of the trace that the store holds when Spark is killed
_SPARK_STARTS_S: Final = 180
_SILENT_S: Final = 120  # a job that gets nothing done for so long is stuck


@dataclass(frozen=True, slots=True)
class Options:
    data: Path
    seconds: float  # of live traffic
    serve: bool = False  # keep the server when all is proved
    port: int = 0  # of the console; 0: any that is free


class _Ended(Exception):
    """SIGTERM or SIGHUP."""


def run(options: Options, voice: Voice, kind: type[Demo] | None = None) -> int:
    """0 if everything was proved, 1 if something was wrong or failed, 130 after Ctrl-C before the proofs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
    try:
        with contextlib.ExitStack() as stack:
            return _run(kind or Demo, options, voice, stack)
    except KeyboardInterrupt:
        voice.line("interrupted; every process that was started has ended")
        return 130
    except _Ended:
        voice.line("told to end; every process that was started has ended")
        return 143
    except Failure as failure:
        voice.wrong(str(failure))
    except kivi.KiviError as error:
        voice.wrong(f"{type(error).__name__}: {error}")
    except OSError as error:
        voice.wrong(f"{error}")
    voice.line(f"The logs are in {options.data / 'logs'}. The demonstration has failed; nothing was proved.")
    return 1


def _ended(number: int, frame: FrameType | None) -> None:
    raise _Ended


def _run(kind: type[Demo], options: Options, voice: Voice, stack: contextlib.ExitStack) -> int:
    data = clean(options.data)
    voice.step(f"working in {data}")
    demo = kind(data, voice, stack)
    address = demo.start_server(options.port)
    voice.line()
    voice.line(f"          The console: {address}", "bold cyan")
    voice.line()
    answered = demo.live_traffic(options.seconds)
    demo.replay()
    findings = demo.prove(answered)
    wrong = [finding for finding in findings if finding.wrong]
    if wrong:
        voice.line(
            f"{len(wrong)} of {len(findings)} checks are WRONG. The data and the logs are in {data}.", "bold red"
        )
    else:
        voice.line(f"All sums are proved: {len(findings)} of {len(findings)} checks.", "bold green")
    if options.serve:
        voice.line()
        voice.line(f"The console stays at {address} until Ctrl-C.", "bold cyan")
        try:
            demo.keep()
        except KeyboardInterrupt:
            voice.line()
        except Failure as failure:  # after the proof: what was proved stays proved
            voice.wrong(str(failure))
            return 1
    demo.stop()
    return 1 if wrong else 0


def clean(data: Path) -> Path:
    """An empty working directory. Raises Failure rather than delete what the demonstration did not make."""
    data = data.absolute()
    if data.exists() and (not data.is_dir() or (any(data.iterdir()) and not (data / _MARK).exists())):
        raise Failure(
            f"{data} is not empty and was not made by this demonstration, so it is left alone: name another with --data"
        )
    if data.exists():
        for entry in data.iterdir():
            if entry.name == _MARK:
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for folder in _FOLDERS:
        (data / folder).mkdir(parents=True)
        (data / _MARK).touch()
    return data


class Demo:
    """The processes and the client; each process is ended by ``stack``, the last one started first."""

    def __init__(self, data: Path, voice: Voice, stack: contextlib.ExitStack) -> None:
        self.data = data
        self.voice = voice
        self._stack = stack
        self._watched: list[Child] = []
        self._endpoint = ""
        self._db: Any = None
        self._killed = 0

    def _start(self, name: str, module: str, *arguments: str, stop_s: float = 20) -> Child:
        # Spark puts its scratch files where SPARK_LOCAL_DIRS says; the rest of its settings are in apm_demo.jobs.
        environment = {"SPARK_LOCAL_DIRS": str(self.data / "spark")}
        child = Child(name, self.data / "logs" / f"{name}.log", module, *arguments, environment=environment)
        self._stack.callback(child.stop, stop_s)
        self._watched.append(child)
        return child

    def _end(self, child: Child) -> None:
        self._watched.remove(child)
        child.stop()

    def _check(self) -> None:
        """Raises Failure if a process that should run does not."""
        for child in self._watched:
            child.check()

    # -- the steps ------------------------------------------------------------------------------------

    def start_server(self, port: int) -> str:
        """The address of its console."""
        self.voice.step("starting kivi serve on its embedded store")
        server = self._start(
            "server", "kivi.cli", "serve", "--data", str(self.data / "store"), "--listen", "localhost:0",
            "--http", f"localhost:{port}",
        )  # fmt: skip
        address = console(server)  # it is said before the server listens
        names = self._connect(server.wait_for("listening on", 60))
        self.voice.note(f"it listens on {self._endpoint} and has {len(names)} tables, of which most are aggregates")
        return address

    def _connect(self, endpoint: str) -> list[str]:
        """Makes the tables there; their names."""
        self._endpoint = endpoint
        self._db = self._stack.enter_context(kivi.connect(endpoint))
        names = tables.create(self._db)
        tables.create_rules(self._db)
        with self._db.transaction() as tx:
            for e in endpoints.ENDPOINTS:
                tx.insert("endpoints", (e.endpoint_id,), **tables.described(e))
        return names

    def live_traffic(self, seconds: float) -> tuple[int, int]:
        """Calls a real web service for a while; how many calls were answered, and how many of them with an error."""
        voice, landing = self.voice, self.data / "landing" / "invocations"
        voice.step(
            "starting a web service of 2 customers, 4 servers and 8 endpoints, and a Spark job for its invocations"
        )
        web = self._start("service", "apm_demo.service", "--land", str(landing))
        ports = web.wait_for("ready", 60)
        job = self._job("live", landing)
        job.wait_for("ready", _SPARK_STARTS_S)
        voice.step(f"calling it over HTTP for {seconds:.0f} s; response times are measured, none is made up")
        load = self._start("load", "apm_demo.load", "--ports", ports, "--seconds", str(seconds))
        began = time.monotonic()
        answered: tuple[int, int] | None = None
        with voice.bar("live traffic", seconds) as bar:
            while answered is None:
                time.sleep(0.3)
                self._check()
                self.meanwhile(time.monotonic() - began)
                for line in load.lines():
                    if line == "slow":
                        voice.note(
                            "the search index is dropped: GET /find has to read all text now and turns slow, "
                            "GET /suggest fails"
                        )
                    elif line == "healed":
                        voice.note("the search index is built again")
                    elif line.startswith("answered "):
                        calls, failed = map(int, line.split()[1:])
                        answered = calls, failed
                events, anomalies = self._live_counts()
                bar.at(time.monotonic() - began, f"{events:,} invocations in the aggregates, {anomalies:,} anomalies")
        self._end(load)
        web.terminate()
        landed = int(web.wait_for("landed", 30))
        self._end(web)
        self._until("Spark brings in the rest", landed, lambda: self._live_counts()[0])
        events, anomalies = self._live_counts()
        voice.note(
            f"{events:,} invocations are in, {anomalies:,} of them slower than twice their endpoint's last average"
        )
        self._end(job)
        return answered

    def meanwhile(self, elapsed_s: float) -> None:
        """Called again and again while there is live traffic."""

    def _live_counts(self) -> tuple[int, int]:
        with self._db.snapshot() as snapshot:
            events = sum(row["calls"] for row in snapshot.scan("customer_1h"))
            anomalies = sum(row["anomalies"] for row in snapshot.scan("anomalies_per_endpoint"))
        return events, anomalies

    def replay(self) -> None:
        """The trace through Spark, which is killed on the way and started again."""
        voice, landing = self.voice, self.data / "landing" / "trace"
        total = land_trace(landing, _TRACE_PIECES)
        voice.step(
            f"replaying a real trace of {total:,} requests to language models through Spark, which gets killed twice"
        )
        voice.note(f"they come shuffled (seed {SEED}): a late one is one more delta in its slot")
        kills = [int(share * total) for share in _KILL_AT]
        with voice.bar("real trace", total) as bar:
            done, silent = 0, time.monotonic()
            job = self._job("trace", landing)
            while job.exit_code is None or kills:
                time.sleep(0.05)
                self._check()
                if job.exit_code is not None and kills:
                    raise Failure("the Spark job was done before it could be killed")
                now = self._trace_count()
                if now > done:
                    done, silent = now, time.monotonic()
                elif time.monotonic() - silent > _SPARK_STARTS_S:
                    raise Failure(f"the Spark job gets nothing done\n{job.tail()}")
                bar.at(done, f"{done:,} requests in the aggregates")
                if kills and done >= kills[0]:
                    kills.pop(0)
                    self._watched.remove(job)
                    job.kill()
                    held = self._trace_count()
                    voice.note(
                        f"kill -9 of the whole Spark job, with {held:,} of {total:,} requests in; starting it again"
                    )
                    silent = time.monotonic()
                    job = self._job("trace", landing)
            bar.at(self._trace_count(), f"{self._trace_count():,} requests in the aggregates")
        self._end(job)

    def _trace_count(self) -> int:
        with self._db.snapshot() as snapshot:
            return sum(row["requests"] for row in snapshot.scan("llm_1h"))

    def _job(self, job: str, landing: Path) -> Child:
        return self._start(
            f"spark-{job}", "apm_demo.jobs", job,
            "--endpoint", self._endpoint,
            "--landing", str(landing),
            "--checkpoint", str(self.data / "checkpoints" / job),
            "--work", str(self.data / "spark"),
            stop_s=3,  # it may be anywhere, and is made for being killed
        )  # fmt: skip

    def _until(self, what: str, total: int, count: Any) -> None:
        """Waits until ``count()`` reaches ``total``. Raises Failure if it stands still."""
        last, since = -1, time.monotonic()
        with self.voice.bar(what, total) as bar:
            while (now := count()) < total:
                self._check()
                if now != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > _SILENT_S:
                    raise Failure(f"{what}: {now:,} of {total:,} came, and then nothing for {_SILENT_S} s")
                bar.at(now, f"{now:,} of {total:,}")
                time.sleep(0.2)

    def prove(self, answered: tuple[int, int]) -> list[Finding]:
        """All checks at one snapshot; says each."""
        self.voice.step("proving the sums: recounting the landed files, and comparing with the store at one snapshot")
        with self._db.snapshot(ttl_s=300) as snapshot:
            live = prove_live(snapshot, self.data / "landing" / "invocations", *answered)
            replayed = prove_trace(snapshot)
            ts = snapshot.ts
        self._say([*live, *replayed])
        self.voice.note(f"(snapshot {ts}; the Spark job of the trace was killed with SIGKILL {len(_KILL_AT)} times)")
        return [*live, *replayed]

    def _say(self, findings: list[Finding]) -> None:
        for finding in findings:
            for sentence in finding.wrong:
                self.voice.wrong(sentence)
            if not finding.wrong:
                self.voice.proved(finding.text)

    def keep(self) -> None:
        while True:
            time.sleep(0.5)
            self._check()

    def stop(self) -> None:
        """A clean end of everything; raises nothing that the exit stack would not."""
        self.voice.step("stopping the server")
        self._watched.clear()
        self._stack.close()


def console(server: Child) -> str:
    """The address of a server's console, at a range that is about as long as the demonstration."""
    return f"{server.wait_for('http on', 60).rstrip('/')}/#/endpoints?range=5m"
