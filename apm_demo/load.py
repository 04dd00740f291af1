"""The traffic: an HTTP client that calls every endpoint over real sockets, for a while.

Each endpoint has a caller of its own that keeps a fixed pace; what it asks for goes through a list of words in order.
On the way the operator drops the search index, and before the end builds it again; meanwhile some calls fail. Each call
has a trace id of its own, as W3C's Trace Context says. Prints how many calls were answered, which has to be the number
of events that land, and how many of them with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections import Counter
from typing import Final

import httpx

from apm_demo.children import end_with_parent
from apm_demo.endpoints import ENDPOINTS, Endpoint
from apm_demo.tables import FAILED

__all__ = ["main"]

WORDS: Final = tuple(
    "python object class import module exception sequence number string type value name".split()  # noqa: SIM905
)
ASKED: Final = 5  # words at a time
CALLS_PER_S: Final = 11.0
SLOW: Final = (0.40, 0.72)  # the part of the time for which the index is away


async def _call_for(client: httpx.AsyncClient, endpoint: Endpoint, base: str, until: float, done: Counter[int]) -> None:
    # Callers start apart from each other, so that their calls do not come in bursts.
    calls, due = 0, time.monotonic() + ENDPOINTS.index(endpoint) / len(ENDPOINTS) / CALLS_PER_S
    while (now := time.monotonic()) < until:
        if now < due:
            await asyncio.sleep(due - now)
        due = max(due + 1 / CALLS_PER_S, now - 1)  # a slow answer is made up for, within a second
        words = " ".join(WORDS[(calls + n) % len(WORDS)] for n in range(ASKED))
        body = json.dumps({"order": calls}).encode() if endpoint.method == "POST" else None
        trace = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
        answer = await client.request(
            endpoint.method, base + endpoint.path, params={"q": words}, content=body, headers=trace
        )
        done[answer.status_code] += 1
        calls += 1


async def _drop_index(client: httpx.AsyncClient, base: str, seconds: float) -> None:
    await asyncio.sleep(SLOW[0] * seconds)
    (await client.delete(f"{base}/index")).raise_for_status()
    print("slow", flush=True)
    await asyncio.sleep((SLOW[1] - SLOW[0]) * seconds)
    (await client.put(f"{base}/index")).raise_for_status()
    print("healed", flush=True)


async def _run(ports: dict[str, int], seconds: float) -> Counter[int]:
    done: Counter[int] = Counter()
    until = time.monotonic() + seconds
    bases = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client, asyncio.TaskGroup() as group:
        for endpoint in ENDPOINTS:
            group.create_task(_call_for(client, endpoint, bases[endpoint.server], until, done))
        group.create_task(_drop_index(client, bases["search-1"], seconds))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=json.loads, required=True, metavar="JSON", help="server -> port")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    end_with_parent()
    done = asyncio.run(_run(args.ports, args.seconds))
    failed = sum(count for status, count in done.items() if status >= FAILED)
    print(f"answered {done.total()} {failed}", flush=True)
    if unforeseen := {status: count for status, count in done.items() if status not in (200, 503)}:
        print(f"answers that nobody expected, by status: {unforeseen}", file=sys.stderr)
    return 1 if unforeseen else 0


if __name__ == "__main__":
    sys.exit(main())
