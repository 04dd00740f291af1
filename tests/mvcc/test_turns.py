"""Turns are taken in the order of asking."""

from __future__ import annotations

import threading

from kivi.mvcc.turns import Turns
from tests.waiting import wait_until


def test_who_gives_a_turn_back_and_asks_again_comes_after_those_that_wait():
    turns, order = Turns(1), list[str]()

    def other() -> None:
        with turns:
            order.append("other")

    with turns:
        thread = threading.Thread(target=other)
        thread.start()
        wait_until(lambda: turns._waiting)
    with turns:
        order.append("first")
    thread.join()
    assert order == ["other", "first"]


def test_so_many_at_a_time_and_all_of_them_in_the_end():
    turns, mutex = Turns(3), threading.Lock()
    inside = most = done = 0

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(200):
            with turns:
                with mutex:
                    inside += 1
                    most = max(most, inside)
                with mutex:
                    inside -= 1
                    done += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, done) == (0, 1600) and 1 <= most <= 3


def test_an_exception_gives_the_turn_back():
    turns = Turns(1)
    for _ in range(2):
        try:
            with turns:
                raise KeyError
        except KeyError:
            pass
    with turns:
        pass
