"""Data frames of others, made of an Arrow table: pandas' and Polars', each loaded when somebody asks for one."""

from __future__ import annotations

import importlib
from typing import Any

from kivi.errors import InvalidArgument

__all__ = ["frame_of"]


def frame_of(package: str, table: Any) -> Any:
    """``package`` is pandas or polars. Raises InvalidArgument if it is not installed."""
    try:
        loaded = importlib.import_module(package)
    except ImportError:
        raise InvalidArgument(f"{package} is not installed: pip install 'kivi[{package}]'") from None
    return table.to_pandas() if package == "pandas" else loaded.from_arrow(table)
