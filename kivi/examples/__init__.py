"""Programs to start from: each runs by itself, proves what it says, and uses public names only.

::

    python -m kivi.examples.metering         calls to language models, metered to the token while processes are killed

Contract: an example is what a user would write. It imports ``kivi`` and ``kivi.aio`` and no module behind them.
"""

from __future__ import annotations
