"""What processes of kivi's own do about what they import: packages they do without, and how the rest is loaded."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import sys
from collections.abc import Iterator

__all__ = ["do_without_pandas", "uncollected"]


class _WithoutPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process of kivi does without pandas", name=fullname)


def do_without_pandas() -> None:
    """From now on this process imports no pandas; for processes that are kivi's own, from their beginning.

    pyarrow imports pandas with its first array, where that is installed, and does without where it is not. A server has
    no use for it: the import held all of its threads up for 0.4 s in the midst of the first commits. Nor has a command:
    it was half of the processor time of ``kivi verify`` on a small store.
    """
    sys.meta_path.insert(0, _WithoutPandas())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports made within are not looked through for garbage, then or later: what they make stays. A tenth of what it
    takes to load a server went into that."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
