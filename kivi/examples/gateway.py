"""A gateway to language models that meters every call, behind FastAPI: copy it, and put your provider's client in.

::

    KIVI_ENDPOINT=localhost:7420 uvicorn kivi.examples.gateway:app

A request comes with an ``Idempotency-Key``. What the model said and what it cost are one transaction, and the caller is
answered after it. So whatever is killed, a caller that asks again under its key gets the answer that was metered, and
a call that no caller heard of is metered once or not at all.

The cost is nobody's code: a rule joins each call with the prices as they are when it is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request
from pydantic import BaseModel

import kivi
import kivi.aio

__all__ = ["app", "create_tables"]

CALL = {"tenant": "string", "provider": "string", "model": "string", "ts": "timestamp"}
MONEY = "decimal(18,9)"


def create_tables(db: Any) -> None:
    """What the gateway writes, and what is derived from it. Prices are per token, in dollars."""
    db.create_table(
        "prices",
        key={"provider": "string", "model": "string"},
        columns={"input_price": MONEY, "output_price": MONEY},
    )
    db.create_table(
        "answers",
        key={"tenant": "string", "request": "string"},
        columns={"text": "string", "input_tokens": "int64", "output_tokens": "int64"},
    )
    tokens = {"input_tokens": "int64", "output_tokens": "int64"}
    db.create_event_table("calls", event_time="ts", columns={**CALL, **tokens, "duration_us": "int64"}, retention="30d")
    db.create_event_table("spend", event_time="ts", columns={**CALL, "cost": MONEY}, retention="30d")
    by = ["tenant", "provider", "model"]
    db.create_aggregate(
        "calls_5m",
        source="calls",
        group_by=[*by, kivi.time_slot("ts", "5m", name="slot")],
        measures={
            "calls": kivi.count(),
            "input_tokens": kivi.sum("input_tokens"),
            "output_tokens": kivi.sum("output_tokens"),
            "latency": kivi.quantiles("duration_us"),
        },
        derived={"p99_us": "quantile(latency, 0.99)"},
    )
    db.create_aggregate(
        "spend_5m",
        source="spend",
        group_by=[*by, kivi.time_slot("ts", "5m", name="slot")],
        measures={"cost": kivi.sum("cost")},
    )
    input_cost = kivi.col("input_tokens") * kivi.ref("input_price")
    output_cost = kivi.col("output_tokens") * kivi.ref("output_price")
    db.create_rule(
        "cost_of_a_call",
        source="calls",
        against=kivi.lookup("prices", by=["provider", "model"]),
        where=kivi.col("input_tokens") >= 0,
        into="spend",
        select={"cost": input_cost + output_cost},
    )


class Asked(BaseModel):
    model: str
    prompt: str


@dataclass
class Completion:
    text: str
    input_tokens: int
    output_tokens: int


async def complete(model: str, prompt: str) -> Completion:
    """Stands in for a provider: it takes its time, and asked twice it says something else. Put your client here."""
    await asyncio.sleep(random.uniform(0.005, 0.05))
    words = random.randint(1, 400)
    return Completion(f"{model} has {words} words to say", len(prompt.split()), words)


@contextlib.asynccontextmanager
async def _connected(app: FastAPI) -> AsyncIterator[None]:
    async with await kivi.aio.connect(os.environ.get("KIVI_ENDPOINT", "localhost:7420"), timeout=30) as db:
        app.state.db = db
        yield


app = FastAPI(lifespan=_connected)


@app.post("/v1/completions")
async def completions(
    request: Request,
    asked: Asked,
    idempotency_key: Annotated[str, Header()],
    tenant: Annotated[str, Header()] = "",
) -> dict[str, Any]:
    """Answers once; asked again under the same key it repeats itself, and neither asks the model nor meters again."""
    db, key = request.app.state.db, (tenant, idempotency_key)
    if (said := await db.get("answers", key)) is None:
        began = time.time()
        completion = await complete(asked.model, asked.prompt)
        event = {
            "tenant": tenant,
            "provider": "stand-in",
            "model": asked.model,
            "ts": int(began * 1_000_000),
            "input_tokens": completion.input_tokens,
            "output_tokens": completion.output_tokens,
            "duration_us": int((time.time() - began) * 1_000_000),
        }

        async def keep(tx: kivi.aio.Transaction) -> None:
            await tx.insert("answers", key, **vars(completion))
            await tx.append("calls", [event])

        try:
            try:
                await db.run(keep, deferred=True)
                said = vars(completion)
            except kivi.RowExists:  # the same request was under way elsewhere: both answer with what was kept first
                said = await db.get("answers", key)
        except kivi.KiviError as error:  # what became of it is not known, maybe: the caller asks again under its key
            raise HTTPException(503, f"not metered yet: ask again under the same key ({error})") from error
    return {name: said[name] for name in ("text", "input_tokens", "output_tokens")}
