"""For tests of programs that use kivi: laws that a measure must hold.

::

    kivi.testing.check_measure("any_of", values=strategies.integers(0, 255))     laws

Comes in: a measure, values. Goes out: nothing, or an AssertionError. May not touch: a store. Needs the package
hypothesis. Begin reading at ``laws``.
"""

from kivi.testing.laws import check_measure

__all__ = ["check_measure"]
