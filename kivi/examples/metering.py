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
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import httpx

import kivi
from kivi.examples.gateway import create_tables

__all__ = ["main"]

PRICES = {"small": ("0.000000150", "0.000000600"), "large": ("0.000002500", "0.000010000")}
TENANTS = ("acme", "globex", "initech")
_PATIENCE_S = 60.0


class Process:
    """A child that is killed and started again, on a port that stays its own."""

    def __init__(self, what: Callable[[int], list[str]], **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port: int = free.getsockname()[1]
        self._command, self._environment = what(self.port), {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

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
            self._process.send_signal(number)
            self._process.wait()
            self._process = None


class Callers:
    """Who asks, and what they were told."""

    def __init__(self, http: httpx.AsyncClient, rate: float, seconds: float) -> None:
        self._http, self._pause_s, self._until = http, 1 / rate, time.monotonic() + seconds
        self._next = time.monotonic()
        self.answered: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str, str]] = Counter()
        self.repeated = 0
        self.took_s: list[float] = []

    async def ask(self, worker: int) -> None:
        """One caller, until the time is up: it asks at the pace of all, and again until it is answered."""
        number = 0
        while self._until > time.monotonic():
            turn, self._next = self._next, max(self._next, time.monotonic() - 1) + self._pause_s
            await asyncio.sleep(turn - time.monotonic())
            number += 1
            tenant, model = random.choice(TENANTS), random.choice(list(PRICES))
            began = time.monotonic()
            said = await self._answer(tenant, model, f"{worker}-{number}")
            self.took_s.append(time.monotonic() - began)
            self.answered[tenant, model] += 1
            for kind in ("input_tokens", "output_tokens"):
                self.tokens[tenant, model, kind] += said[kind]

    async def _answer(self, tenant: str, model: str, key: str) -> dict[str, Any]:
        body, headers = {"model": model, "prompt": "why is the sky blue"}, {"Idempotency-Key": key, "tenant": tenant}
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                reply = await self._http.post("/v1/completions", json=body, headers=headers)
                if reply.status_code == 200:
                    found: dict[str, Any] = reply.json()
                    return found
                failed = f"{reply.status_code} {reply.text}"
            except httpx.HTTPError as error:
                failed = repr(error)
            if time.monotonic() > deadline:
                raise RuntimeError(f"request {key} is not answered: {failed}")
            self.repeated += 1
            await asyncio.sleep(0.2)


async def _story(address: str, rate: float, seconds: float, workers: int, victims: list[Process]) -> Callers:
    """All callers, and on the way the victims one after the other."""

    async def killing() -> None:
        for victim in victims:
            await asyncio.sleep(seconds / (len(victims) + 1))
            victim.end()
            await asyncio.to_thread(victim.start)

    limits = httpx.Limits(max_connections=workers)
    async with httpx.AsyncClient(base_url=address, timeout=10, limits=limits) as http, asyncio.TaskGroup() as group:
        callers = Callers(http, rate, seconds)
        for worker in range(workers):
            group.create_task(callers.ask(worker))
        group.create_task(killing())
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
        store = Process(lambda port: [*python, "kivi_server", "--data", folder, "--listen", f"localhost:{port}"])
        endpoint = f"localhost:{store.port}"
        serve = ["uvicorn", "kivi.examples.gateway:app", "--log-level", "error", "--port"]
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
        address, victims = f"http://localhost:{gateway.port}", [gateway, store] * options.kills
        callers = asyncio.run(_story(address, options.rate, options.seconds, options.workers, victims))
        took_s = time.monotonic() - began
        with kivi.connect(endpoint) as db, db.snapshot() as snap:
            return _told(callers, took_s, *_metered(snap))


def _told(callers: Callers, took_s: float, tokens: Counter[Any], cost: dict[Any, Decimal]) -> int:
    """Prints both sides; 0 if they are equal."""
    calls = callers.answered.total()
    p99_ms = sorted(callers.took_s)[int(0.99 * calls)] * 1e3
    print(f"{calls} calls in {took_s:.0f} s ({calls / took_s:.0f} a second), p99 {p99_ms:.0f} ms; ", end="")
    print(f"{callers.repeated} were asked again")
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
