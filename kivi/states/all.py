"""Every kind of state that kivi has: importing this makes them known to ``kind_of``."""

from kivi.states import distinct, moments, own, quantiles, top, winners

__all__ = ["distinct", "moments", "own", "quantiles", "top", "winners"]
