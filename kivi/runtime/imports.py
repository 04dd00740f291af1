"""Packages that a process does without, though they are installed."""

from __future__ import annotations

import importlib.abc
import sys

__all__ = ["do_without_pandas"]


class _WithoutPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process of kivi does without pandas", name=fullname)


def do_without_pandas() -> None:
    """From now on this process imports no pandas; for processes that are kivi's own, from their beginning.

    pyarrow imports pandas with its first array, where that is installed, and does without where it is not. A server has
    no use for it: the import held all of its threads up for 0.4 s in the midst of the first commits.
    """
    sys.meta_path.insert(0, _WithoutPandas())
