"""A read-only walk over a log's directory, for `kivi dump` and `kivi verify`.

It opens files to read, takes no lock and changes nothing, so it may look at a damaged log and at one
that is in use (of which it may then see an unfinished end: a `Damage` that is not fatal). It judges by the
rules of `kivi.log.recovery`, but where those stop at the first damage, this goes on with the next segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from kivi.log import Record
from kivi.log.files import Files
from kivi.log.mark import MARK_NAME, Mark, parse_mark
from kivi.log.records import VERSION, End, SegmentHeader, is_segment_name, segment_name, walk
from kivi.log.recovery import Segment, read_header

__all__ = ["Damage", "inspect", "read_mark"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that should not be there: ``fatal`` if the log will refuse to open, else cut at open."""

    reason: str
    fatal: bool


def read_mark(directory: str) -> Mark | None:
    """The mark of the log in the directory; None if it is missing or damaged."""
    files = Files()
    try:
        fd = files.open(os.path.join(directory, MARK_NAME), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return parse_mark(files, fd)
    finally:
        files.close(fd)


def inspect(directory: str) -> Iterator[tuple[str, int, Record | Damage]]:
    """(path, offset, record or damage) for everything in the directory, in log order. Raises ``OSError``."""
    files, mark = Files(), read_mark(directory)
    names = sorted(name for name in files.listdir(directory) if is_segment_name(name))
    mark_path = os.path.join(directory, MARK_NAME)
    if mark is None:
        if names:
            yield mark_path, 0, Damage("the acknowledged mark is missing or damaged", fatal=True)
        mark = Mark()
    names = [name for name in names if int(name[:20]) >= mark.first]
    if mark.first and segment_name(mark.first) not in names:
        path = os.path.join(directory, segment_name(mark.first))
        yield path, 0, Damage("the first segment is missing", fatal=True)
    headers = [read_header(files, os.path.join(directory, name), mark) for name in names]
    before: tuple[str, End] | None = None
    for i, name in enumerate(names):
        path, header = os.path.join(directory, name), headers[i]
        if isinstance(header, SegmentHeader) and header.version > VERSION:
            header = f"format {header.version} is newer than this kivi"
        if isinstance(header, str):
            yield path, 0, Damage(header, fatal=True)
            before = None
            continue
        if before is not None and (before[1].sequence, before[1].chain) != (header.previous, header.chain):
            reason = f"it ends with record {before[1].sequence}, the next segment follows {header.previous}"
            yield before[0], before[1].offset, Damage(reason, fatal=True)
        following = headers[i + 1] if i + 1 < len(names) else None
        limit = following.previous if isinstance(following, SegmentHeader) else None
        end = End(Segment(path, header).start().offset, header.previous, 0, header.chain, None)
        for offset, item in _segment(files, path, header, limit):
            if isinstance(item, Record):
                yield path, offset, item
                continue
            last = item.sequence if item.sequence >= header.first else header.previous
            end = End(item.offset, last, item.time_us, item.chain, item.damage)
            if item.damage is not None:
                yield path, offset, Damage(item.damage, fatal=i + 1 < len(names) or last < mark.sequence)
        before = path, end
    if before is not None and before[1].sequence < mark.sequence and before[1].damage is None:
        reason = f"the log ends at {before[1].sequence}, but {mark.sequence} was acknowledged"
        yield before[0], before[1].offset, Damage(reason, fatal=True)


def _segment(files: Files, path: str, header: SegmentHeader, limit: int | None) -> Iterator[tuple[int, Record | End]]:
    """The records up to number ``limit`` (the next segment supersedes the others), then the end."""
    start = Segment(path, header).start()
    if limit is not None and limit < header.first:
        yield start.offset, start
        return
    fd = files.open(path, os.O_RDONLY)
    try:
        for item in walk(files, fd, files.size(fd), start):
            if isinstance(item, End):
                yield item.offset, item
                return
            yield item.offset, item.record()
            if item.last == limit:
                yield item.end, End(item.end, limit, item.time_us, item.checksum, None)
                return
    finally:
        files.close(fd)
