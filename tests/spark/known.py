"""What is known to be wrong elsewhere. A mark goes when its defect does: strict, so that nobody has to remember."""

from __future__ import annotations

import pytest

STAGES_BEFORE_TOKEN = pytest.mark.xfail(
    strict=True, reason="Store.load_stages refuses stages that are committed before the batch token is looked up (R16)"
)
