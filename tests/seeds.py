"""Of which seeds histories are made: of few by day, and of many by night (decisions 0096, 0107).

::

    @pytest.mark.parametrize("seed", seeds(1, 2, night=40))    # by night 0, 3, 4 ... 39 as well
    @pytest.mark.parametrize("seed", seeds(1, *stories(2), night=40))    # 2 in ``make stories``, not in ``make test``

**Invariant:** every planted bug is caught by the seeds of the day, its stories among them.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings

__all__ = ["AT_NIGHT", "seeds", "stories"]

AT_NIGHT: Final = settings.get_current_profile_name() == "nightly"


def stories(*values: Any) -> list[Any]:
    """Arguments of a test, or tuples of them, with which it takes as long as a story."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.story) for each in several]


def seeds(*by_day: Any, night: int) -> list[Any]:
    """Those of the day, and in ``make properties`` all others below ``night``, which nothing but that runs."""
    taken = {seed if isinstance(seed, int) else seed.values[0] for seed in by_day}
    more = [seed for seed in range(night) if seed not in taken] if AT_NIGHT else []
    return [*by_day, *(pytest.param(seed, marks=pytest.mark.hypothesis) for seed in more)]
