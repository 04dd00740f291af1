"""How deep JSON is, compared with what is in it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kivi.errors import InvalidArgument
from kivi.model import json_texts
from kivi.model.json_texts import LEVELS_MAX, read_json


def levels(value: Any) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(levels, value.values() if isinstance(value, dict) else value), default=0)


def made(rng: random.Random, most: int) -> Any:
    if most == 0 or rng.random() < 0.2:
        return rng.choice(['"', "[", "\\", '\\"', "}{", "", 1, None, 'a\\\\"["', "é]\n", "\ud800[", "∢嬀"])
    parts = [made(rng, most - 1) for _ in range(rng.randrange(4))]
    return parts if rng.random() < 0.5 else {rng.choice('"[\\]x{') + str(i): part for i, part in enumerate(parts)}


def test_levels_are_those_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, counts = random.Random(7), set[int]()
    for _ in range(2_000):
        value = made(rng, rng.randrange(9))
        counts.add(deep := levels(value))
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        data: bytes | str = text.encode(rng.choice(["utf-8", "utf-16", "utf-32"]), "surrogatepass")
        data = data if rng.random() < 0.5 else text
        monkeypatch.setattr(json_texts, "LEVELS_MAX", deep)
        assert read_json(data, "it") == value
        monkeypatch.setattr(json_texts, "LEVELS_MAX", deep - 1)
        if deep:
            with pytest.raises(InvalidArgument, match=f"^it has more than {deep - 1} levels"):
                read_json(data, "it")
    assert counts >= set(range(7))


@pytest.mark.parametrize("count", [LEVELS_MAX + 1, 990, 100_000])
def test_no_stack_is_too_small(count: int) -> None:
    for text in ("[" * count + "]" * count, '{"a":' * count + "1" + "}" * count):
        for data in text, text.encode():
            with pytest.raises(InvalidArgument, match="levels"):
                read_json(data, "it")
    assert levels(read_json("[" * LEVELS_MAX + "]" * LEVELS_MAX, "it")) == LEVELS_MAX
    with pytest.raises(ValueError, match="Expecting"):
        read_json("[" * 900, "it")
