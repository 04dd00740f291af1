"""Checksums are zlib's, whoever computes them: what is on disk must not depend on it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.runtime.checksum import crc32


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_it_is_zlibs(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer, lambda data: memoryview(data)[3:-5]])
def test_of_any_bytes(kind: Any) -> None:
    data = bytes(range(256)) * 5_000
    assert crc32(kind(data), 7) == zlib.crc32(bytes(kind(data)), 7)


def test_the_quick_one_is_used_where_it_is_installed_and_zlibs_elsewhere() -> None:
    assert crc32.__module__ == pytest.importorskip("isal.isal_zlib").__name__
    without = (
        "import sys; sys.modules['isal'] = None; import kivi.runtime.checksum as c, zlib; assert c.crc32 is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", without], check=True)
