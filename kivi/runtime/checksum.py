"""CRC-32 as zlib has it, of log records, event blocks and request digests.

By ISA-L where it is installed, which is many times as quick as zlib (decision 0008).
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # a platform without its wheel
    from zlib import crc32

__all__ = ["crc32"]
