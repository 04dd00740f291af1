"""Meters calls to language models while their gateway and the store are killed, and proves that nothing is lost.

::

    python -m kivi.examples.metering --seconds 300 --rate 500 --workers 64 --kills 2

Starts a store and a gateway (``kivi.examples.gateway``), asks as ``--workers`` callers who repeat what was not
answered, and kills the one and the other by SIGKILL, ``--kills`` times each. In the end tokens and cost of each
tenant and model, as the store has them, are those of the answers that the callers got, to the unit. Exit code 1 if
they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import kivi
from kivi.examples.gateway import create_tables

__all__ = ["main"]

PRICES = {"small": ("0.000000150", "0.000000600"), "large": ("0.000002500", "0.000010000")}
TENANTS = ("acme", "globex", "initech")
_PATIENCE_S = 60.0


def _used_s(by: int) -> float:
    used = resource.getrusage(by)
    return used.ru_utime + used.ru_stime


class Process:
    """A child that is killed and started again, on a port that stays its own."""

    def __init__(self, what: Callable[[int], list[str]], **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port: int = free.getsockname()[1]
        self._command, self._environment = what(self.port), {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self.used_s = 0.0
        """Time of a processor, of those that have ended, with what it took to begin."""

    def start(self) -> None:
        """Returns when it takes connections. Raises RuntimeError if it ends before."""
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self.port), 1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self._command[1:4])} does not listen")

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            before = _used_s(resource.RUSAGE_CHILDREN)
            self._process.send_signal(number)
            self._process.wait()
            self._process = None
            self.used_s += _used_s(resource.RUSAGE_CHILDREN) - before


class Connection:
    """HTTP/1.1 over a connection that stays open, as plain as it can be: who asks shares two cores with what is asked,
    and ``http.client`` takes twice the processor's time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer. Raises OSError, ValueError or KeyError; the next one opens it anew."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("localhost", self._port), 10)
            named = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
            lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
            self._socket.sendall("\r\n".join([*lines, "\r\n"]).encode() + body)
            head, found = self._until(b"", lambda text: b"\r\n\r\n" in text).split(b"\r\n\r\n", 1)
            first, *lines = head.decode().lower().split("\r\n")
            length = int(dict(line.split(": ", 1) for line in lines)["content-length"])
            return int(first.split()[1]), self._until(found, lambda text: len(text) >= length)
        except BaseException:
            self.close()
            raise

    def _until(self, text: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
        while not is_whole(text):
            assert self._socket is not None
            if not (more := self._socket.recv(1 << 16)):
                raise ConnectionError("the gateway hung up")
            text += more
        return text

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Callers:
    """Who asks, and what they were told. Each is a thread with a connection of its own."""

    def __init__(self, port: int, rate: float, seconds: float) -> None:
        self._port, self._pause_s, self._until = port, 1 / rate, time.monotonic() + seconds
        self._next, self._lock = time.monotonic(), threading.Lock()
        self.answered: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str, str]] = Counter()
        self.repeated = 0
        self.took_s: list[float] = []

    def ask(self, worker: int) -> None:
        """One caller, until the time is up: it asks at the pace of all, and again until it is answered. What was not
        asked while something was down is asked after that."""
        number = 0
        with contextlib.closing(Connection(self._port)) as http:
            while self._until > time.monotonic():
                with self._lock:
                    turn, self._next = self._next, self._next + self._pause_s
                time.sleep(max(0.0, turn - time.monotonic()))
                number += 1
                tenant, model = random.choice(TENANTS), random.choice(list(PRICES))
                began = time.monotonic()
                said = self._answer(http, tenant, model, f"{worker}-{number}")
                with self._lock:
                    self.took_s.append(time.monotonic() - began)
                    self.answered[tenant, model] += 1
                    for kind in ("input_tokens", "output_tokens"):
                        self.tokens[tenant, model, kind] += said[kind]

    def _answer(self, http: Connection, tenant: str, model: str, key: str) -> dict[str, Any]:
        body = json.dumps({"model": model, "prompt": "why is the sky blue"}).encode()
        headers = {"Idempotency-Key": key, "tenant": tenant, "Content-Type": "application/json"}
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                status, text = http.ask("/v1/completions", headers, body)
                if status == 200:
                    found: dict[str, Any] = json.loads(text)
                    return found
                failed = f"{status} {text.decode()}"
            except (OSError, ValueError, KeyError) as error:
                failed = repr(error)
            if time.monotonic() > deadline:
                raise RuntimeError(f"request {key} is not answered: {failed}")
            with self._lock:
                self.repeated += 1
            time.sleep(0.2)


def _story(port: int, rate: float, seconds: float, workers: int, victims: list[Process]) -> Callers:
    """All callers, and on the way the victims one after the other."""
    with ThreadPoolExecutor(workers) as pool:
        callers = Callers(port, rate, seconds)
        asking = [pool.submit(callers.ask, worker) for worker in range(workers)]
        for victim in victims:
            time.sleep(seconds / (len(victims) + 1))
            victim.end()
            victim.start()
        for each in asking:
            each.result()
    return callers


def _metered(snap: Any) -> tuple[Counter[tuple[str, str, str]], dict[tuple[str, str], Decimal]]:
    """What the store has: tokens by tenant, model and kind; cost by tenant and model."""
    tokens, cost = Counter[tuple[str, str, str]](), dict[tuple[str, str], Decimal]()
    for row in snap.rollup("calls_5m", by=["tenant", "model"], measures=["input_tokens", "output_tokens"]):
        for kind in ("input_tokens", "output_tokens"):
            tokens[row["tenant"], row["model"], kind] = row[kind]
    for row in snap.rollup("spend_5m", by=["tenant", "model"]):
        cost[row["tenant"], row["model"]] = row["cost"]
    return tokens, cost


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kivi.examples.metering", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=200.0, help="calls a second, of all callers")
    parser.add_argument("--workers", type=int, default=64, help="callers at a time")
    parser.add_argument("--kills", type=int, default=1, help="how often the gateway and the store are killed, each")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        python = [sys.executable, "-m"]
        serve_store = [
            "kivi_server",
            "--data",
            folder,
            "--set",
            "flush_every_s=5",
            "--listen",
        ]  # to begin again quickly
        store = Process(lambda port: [*python, *serve_store, f"localhost:{port}"])
        endpoint = f"localhost:{store.port}"
        serve = ["uvicorn", "kivi.examples.gateway:app", "--log-level", "error", "--no-access-log", "--port"]
        gateway = Process(lambda port: [*python, *serve, str(port)], KIVI_ENDPOINT=endpoint)
        for process in (store, gateway):
            stack.callback(process.end)
            process.start()
            if process is store:
                with kivi.connect(endpoint) as db:
                    create_tables(db)
                    with db.transaction() as tx:
                        for model, (input_price, output_price) in PRICES.items():
                            tx.put("prices", ("stand-in", model), input_price=input_price, output_price=output_price)
        began = time.monotonic()
        victims = [gateway, store] * options.kills
        callers = _story(gateway.port, options.rate, options.seconds, options.workers, victims)
        took_s = time.monotonic() - began
        with kivi.connect(endpoint) as db, db.snapshot() as snap:
            metered = _metered(snap)
        used_s = {"callers": _used_s(resource.RUSAGE_SELF)}
        for name, process in (("gateway", gateway), ("store", store)):
            process.end()
            used_s[name] = process.used_s
        return _told(callers, took_s, used_s, *metered)


def _told(
    callers: Callers, took_s: float, used_s: dict[str, float], tokens: Counter[Any], cost: dict[Any, Decimal]
) -> int:
    """Prints both sides; 0 if they are equal."""
    calls = callers.answered.total()
    p99_ms = sorted(callers.took_s)[int(0.99 * calls)] * 1e3
    print(f"{calls} calls in {took_s:.0f} s ({calls / took_s:.0f} a second), p99 {p99_ms:.0f} ms; ", end="")
    print(f"{callers.repeated} were asked again")
    of_a_call = ", ".join(f"{name} {used / calls * 1e6:.0f}" for name, used in used_s.items())
    print(f"microseconds of a processor a call, with what it took to begin: {of_a_call}")
    wrong = 0
    for tenant, model in sorted(callers.answered):
        told = [callers.tokens[tenant, model, kind] for kind in ("input_tokens", "output_tokens")]
        due = sum((Decimal(price) * n for price, n in zip(PRICES[model], told, strict=True)), Decimal(0))
        kept = [tokens[tenant, model, kind] for kind in ("input_tokens", "output_tokens")]
        same = told == kept and cost.get((tenant, model)) == due
        wrong += not same
        print(f"{tenant:8} {model:6} {kept[0]:>9} + {kept[1]:>9} tokens, $ {due}", "exact" if same else "WRONG")
        if not same:
            print(f"    the callers were told {told}, and owe {due}; the store has {cost.get((tenant, model))}")
    return 1 if wrong or tokens.total() != callers.tokens.total() else 0


if __name__ == "__main__":
    sys.exit(main())
