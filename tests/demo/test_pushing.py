"""What the dashboard's states are made of: snapshots that all parts know, and differences. Without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from apm_demo.pushing import Found, Span, View, together
from apm_demo.views import Question, State, differences

Row = dict[str, Any]


def history(steps: list[tuple[int, int]]) -> list[Span]:
    """Spans from (gap before, length) each, in order; the rows name the span."""
    found: list[Span] = []
    at = 0
    for n, (gap, length) in enumerate(steps):
        at += gap + 1
        found.append(Span(at, at + length, float(n), [{"span": n}]))
        at += length
    return found


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6)


@given(st.lists(STEPS.map(history), min_size=1, max_size=4))
def test_together_is_the_newest_snapshot_that_all_know(histories: list[list[Span]]) -> None:
    def known(ts: int) -> bool:
        return all(any(span.ts <= ts <= span.upto for span in spans) for spans in histories)

    expected = next((ts for ts in range(60, -1, -1) if known(ts)), None)
    found = together(histories)
    assert (found.ts if found else None) == expected
    if found is not None:
        for rows, spans in zip(found.rows, histories, strict=True):
            assert rows is next(span.rows for span in spans if span.ts <= found.ts <= span.upto)


SECTION = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2))
STATES = st.fixed_dictionaries({"children": SECTION, "totals": SECTION})


def merged(state: State, change: dict[str, Any]) -> State:
    """As the page does it."""
    now = {section: {**values, **change["set"].get(section, {})} for section, values in state.items()}
    for section, names in change["gone"].items():
        for name in names:
            del now[section][name]
    return now


@given(STATES, STATES)
def test_differences_lead_from_one_state_to_the_other(before: State, after: State) -> None:
    change = json.loads(json.dumps(differences(before, after)))
    assert merged(before, change) == after
    assert differences(after, after) == {"set": {}, "gone": {}}


def test_a_slow_browser_passes_states_over() -> None:
    """A thousand states while it does not take the next message: one change, to the newest."""

    def made(n: int) -> State:
        return {"totals": {"count": n}, "children": {str(n): n, "same": 0}}

    async def run() -> list[str]:
        view = View(Question())
        view.put(made(0), Found(1, 0.0, []))
        messages = view.messages()
        taken = [await anext(messages)]
        for n in range(1, 1_001):
            view.put(made(n), Found(n + 1, 0.0, []))
        taken += [await anext(messages), await anext(messages)]
        return taken

    first, second, third = (text.splitlines() for text in asyncio.run(run()))
    assert first[0] == "event: state"
    assert second[0] == "event: change"
    assert json.loads(second[1].removeprefix("data: "))["ts"] == 1_001
    state = merged(json.loads(first[2].removeprefix("data: ")), json.loads(second[2].removeprefix("data: ")))
    assert state == made(1_000)
    assert third[0] == "event: fresh"
