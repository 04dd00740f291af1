"""Messages that are filled anew for each answer hold nothing of the answer before."""

from __future__ import annotations

import random
import threading

import pytest
from kivi_server.fewrows import FewRows

from kivi.wire.v1 import session_pb2


def made(request_id: int, start_ts: int, rows: list[tuple[int, ...]]) -> bytes:
    """The same answer in a message of its own."""
    response = session_pb2.Response(id=request_id, start_ts=start_ts)
    response.page.SetInParent()
    for row in rows:
        response.page.rows.add(found=True, integers=row)
    return response.SerializeToString()


def test_each_answer_is_what_a_new_message_would_be() -> None:
    few, failures = FewRows(), []

    def ask(seed: int) -> None:
        random_ = random.Random(seed)
        for i in range(2_000):
            width, top = random_.randrange(7), 1 << random_.randrange(64)
            rows = [tuple(random_.randrange(-top, top) for _ in range(width)) for _ in range(random_.randrange(25))]
            if few.page(i, seed, rows).SerializeToString() != made(i, seed, rows):
                failures.append((seed, i))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_what_cannot_be_filled_in_does_not_stay() -> None:
    few = FewRows()
    few.page(1, 1, [(1, 2), (3, 4)])
    with pytest.raises(ValueError, match="range"):
        few.page(2, 2, [(5,), (1 << 64,)])
    assert few.page(3, 3, [(6,), (7,)]).SerializeToString() == made(3, 3, [(6,), (7,)])
