"""Of which seeds histories are made: of few by day, and of many by night (decision 0096).

::

    @pytest.mark.parametrize("seed", seeds(1, 2, night=40))    # by night 0, 3, 4 ... 39 as well

**Invariant:** every planted bug is caught by the seeds of the day.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings

__all__ = ["AT_NIGHT", "seeds"]

AT_NIGHT: Final = settings.get_current_profile_name() == "nightly"


def seeds(*by_day: int, night: int) -> list[Any]:
    """Those of the day, and in ``make properties`` all others below ``night``, which nothing but that runs."""
    more = [seed for seed in range(night) if seed not in by_day] if AT_NIGHT else []
    return [*by_day, *(pytest.param(seed, marks=pytest.mark.hypothesis) for seed in more)]
