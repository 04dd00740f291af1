"""The bytes of a row of commit times: at which microsecond which commit entered the log.

One row holds consecutive commits, ``MOMENTS_MAX`` at most. Its key is its first moment
(``kivi.encoding.keyspaces.time_key``), its value::

    offset  size    field
    0       1       a: bytes of a step of time, 1, 2, 4 or 8
    1       1       b: bytes of a step of commit timestamps, likewise
    2       8       cts: the first commit timestamp
    10      n * a   from each moment to the next, microseconds
    ..      n * b   from each commit timestamp to the next

All integers are little endian, steps are above zero, and a row of n steps holds n + 1 moments. A moment resolves to the
last commit at or before it, so of several commits in one microsecond only the last is written.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.encoding.keyspaces import split_time_key, time_key
from kivi.errors import DataLoss

__all__ = ["MOMENTS_MAX", "Stamps", "decode_moments", "encode_moments"]

Stamps = npt.NDArray[np.uint64]

MOMENTS_MAX: Final = 4_096
"""Moments in one row, which a lookup decodes as a whole."""

_HEAD: Final = struct.Struct("<BBQ")
_WIDTHS: Final = (1, 2, 4, 8)


def encode_moments(times_us: Stamps, stamps: Stamps) -> list[tuple[bytes, bytes]]:
    """(key, value) of each row. Both have one entry per commit, in log order: times never fall, stamps rise."""
    if not len(times_us):
        return []
    last = np.append(times_us[1:] != times_us[:-1], True)
    times_us, stamps = times_us[last], stamps[last]
    out = []
    for at in range(0, len(times_us), MOMENTS_MAX):
        part = slice(at, at + MOMENTS_MAX)
        time_width, time_steps = _steps(times_us[part])
        stamp_width, stamp_steps = _steps(stamps[part])
        head = _HEAD.pack(time_width, stamp_width, int(stamps[at]))
        out.append((time_key(int(times_us[at])), head + time_steps + stamp_steps))
    return out


def _steps(values: Stamps) -> tuple[int, bytes]:
    steps = np.diff(values)
    largest = int(steps.max()) if len(steps) else 0
    width = next(width for width in _WIDTHS if largest < 256**width)
    return width, steps.astype(f"<u{width}").tobytes()


def decode_moments(key: bytes, value: bytes) -> tuple[Stamps, Stamps]:
    """(moments, microseconds; the commit timestamp that was newest at each), both rising. Raises DataLoss."""
    if len(value) < _HEAD.size or len(key) != 9:
        raise _damaged(key, value)
    time_width, stamp_width, stamp = _HEAD.unpack_from(value)
    count, rest = divmod(len(value) - _HEAD.size, time_width + stamp_width or 1)
    if time_width not in _WIDTHS or stamp_width not in _WIDTHS or rest or count >= MOMENTS_MAX:
        raise _damaged(key, value)
    between = _HEAD.size + count * time_width
    time_steps: Any = np.frombuffer(value, f"<u{time_width}", count, _HEAD.size)
    stamp_steps: Any = np.frombuffer(value, f"<u{stamp_width}", count, between)
    if not (time_steps.all() and stamp_steps.all()):
        raise _damaged(key, value)
    return _summed(split_time_key(key), time_steps), _summed(stamp, stamp_steps)


def _summed(first: int, steps: Any) -> Stamps:
    values = np.empty(len(steps) + 1, np.uint64)
    values[0] = first
    values[1:] = steps
    return np.cumsum(values, dtype=np.uint64)


def _damaged(key: bytes, value: bytes) -> DataLoss:
    return DataLoss(
        f"the commit times at key 0x{key.hex()} ({len(value)} bytes) are damaged, or of another version of kivi: "
        "restore a backup"
    )
