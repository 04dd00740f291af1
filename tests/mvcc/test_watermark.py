"""R11, R12, R17: the watermark is the largest t such that every number <= t is finished."""

from __future__ import annotations

import itertools
import threading

import pytest

from kivi.mvcc.watermark import Watermark


def fresh(value: int = 0) -> Watermark:
    return Watermark(value, threading.RLock())


def test_r11_the_example() -> None:
    """1 and 2 in flight, 2 finishes: readers still get 0. 1 finishes: readers get 2."""
    watermark = fresh()
    watermark.enter(1)
    watermark.enter(2)
    watermark.finish(2)
    assert watermark.value == 0
    watermark.finish(1)
    assert (watermark.value, watermark.in_flight) == (2, 0)


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4, 5), (3, 4, 9, 10, 1000)], ids=["dense", "with gaps"])
def test_r11_every_order_of_finishing(numbers: tuple[int, ...]) -> None:
    for order in itertools.permutations(numbers):
        watermark = fresh()
        for number in numbers:
            watermark.enter(number)
        finished: set[int] = set()
        for number in order:
            watermark.finish(number)
            finished.add(number)
            prefix = list(itertools.takewhile(finished.__contains__, numbers))
            assert watermark.value == (prefix[-1] if prefix else 0)


def test_r12_what_is_never_finished_freezes_it() -> None:
    watermark = fresh()
    for number in range(1, 100):
        watermark.enter(number)
    for number in range(2, 100):
        watermark.finish(number)
    assert watermark.value == 0
    assert watermark.in_flight == 99


def test_r17_acknowledgements_wait_for_the_watermark_in_commit_order() -> None:
    watermark = fresh()
    said: list[int] = []
    for number in (1, 2, 3, 4):
        watermark.enter(number)
    for number in (4, 2, 3):
        watermark.finish(number, lambda number=number: said.append(number))  # type: ignore[misc]
        assert said == []
    watermark.finish(1, lambda: said.append(1))
    assert said == [1, 2, 3, 4]


def test_an_acknowledgement_may_use_the_watermark() -> None:
    """Callbacks run outside the lock: one that enters and finishes another number does not deadlock."""
    watermark = fresh()

    def again() -> None:
        watermark.enter(2)
        thread = threading.Thread(target=watermark.finish, args=(2,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    watermark.enter(1)
    watermark.finish(1, again)
    assert watermark.value == 2


def test_waiting_ends_when_it_is_there_or_the_time_is_up() -> None:
    watermark = fresh()
    watermark.enter(1)
    assert not watermark.wait_for(1, 0.01)
    threading.Timer(0.02, watermark.finish, [1]).start()
    assert watermark.wait_for(1, 60)
    assert watermark.wait_for(0, 0)


def test_it_never_goes_back_under_threads() -> None:
    watermark = fresh()
    lock = threading.Lock()
    count = itertools.count(1)
    seen: list[int] = []

    def work() -> None:
        for _ in range(200):
            with lock:
                number = next(count)
                watermark.enter(number)
            watermark.finish(number, lambda number=number: seen.append(watermark.value - number))  # type: ignore[misc]

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watermark.value == 1600
    assert len(seen) == 1600
    assert min(seen) >= 0, "R17: acknowledged below the watermark"
