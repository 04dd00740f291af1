"""An event table whose blocks are made anew, with other events than they had: all at once, or not at all.

::

    apart     what is there is kept from what comes meanwhile, with room for the new blocks between both in the order
    make      block by block, each named in meta as out of use: what a crash or an error leaves is deleted, and nothing
              that the table's headers name by then
    swap      one engine batch: the new headers, and no longer those that were there and the settled files

What comes meanwhile is sealed and compacted as ever, and stays as it is. Nothing is settled until the swap.

Views that are open go on with what they have, until they close. What a view at an earlier snapshot would see, and the
new blocks do not have, is refused from then on: events below the retention floor, and retracted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kivi.arrow.dictionaries import chunks, coded, written_bytes
from kivi.encoding.event_names import STAMP
from kivi.encoding.keyspaces import event_header_key, event_meta_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import ResourceExhausted, Unavailable
from kivi.events.blocks import Block
from kivi.events.settling import Lock, data_of
from kivi.events.store import EventStore

__all__ = ["Wanted", "rewrite"]

_BLOCKS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be there, in commit order, with STAMP: of all that a snapshot at ``upto`` sees, where the blocks end.
    ``hidden``: what the floor hides there is not among it, and this is asked at the end for the newest commit of that
    or of what was dropped; None: all that is there is among it."""

    batches: Iterable[Any]
    upto: int
    hidden: Callable[[], int] | None = None


def rewrite(store: EventStore, engine: Engine, begin: Callable[[], Wanted], *, lock: Lock) -> int:
    """``begin`` is called with the lock held: what comes after that is not among the blocks that are made anew. How
    many events there are of these now."""
    headers, count = list[tuple[bytes, bytes]](), 0
    last, in_commit = 0, 0
    try:
        with lock:
            order, made = store.set_apart(_BLOCKS_MAX), store.made
            wanted = begin()
            if wanted.upto < store.events_upto:  # what lies between them would be in no block any more
                raise Unavailable(f"{store.schema.name!r} has events above {wanted.upto} in blocks: it is tried again")
            erased_upto = store.parts[0].meta().erased_upto
        for chunk in _of_a_block(wanted.batches, *store.block_size):
            if len(made) == _BLOCKS_MAX:
                raise ResourceExhausted(f"{store.schema.name!r} would have more than {_BLOCKS_MAX} blocks")
            stamps = chunk.column(STAMP).to_numpy().astype(np.uint64)
            cts, counts = np.unique(stamps, return_counts=True)
            first = in_commit if int(cts[0]) == last else 0
            in_commit = int(counts[-1]) + (first if len(cts) == 1 else 0)
            last = int(cts[-1])
            count += chunk.num_rows
            with lock:
                base, _, _ = store.parts
                meta = base.meta()
                number, batch, held = meta.next, WriteBatch(), WriteBatch()
                at = order + len(made)
                base.add(held, at, number, coded(chunk.drop_columns([STAMP])), (cts, counts), first=first)
                header = event_header_key(store.schema.id, at)
                for key, value in held:
                    assert value is not None
                    if key == header:
                        headers.append((key, value))
                    else:
                        batch.put(key, value)
                meta.next += 1
                meta.dead.append(number)
                made.append(number)
                batch.put(event_meta_key(store.schema.id), meta.encode())
                engine.write(batch)
        with lock:
            if store.parts[0].meta().erased_upto != erased_upto:
                raise Unavailable(f"events of {store.schema.name!r} were retracted meanwhile: it is tried again")
            _swap(store, made, headers, count, wanted, order)
            store.rejoin()
    except BaseException:
        with lock:
            store.rejoin()
        raise
    return count


def _of_a_block(batches: Iterable[Any], rows: int, nbytes: int) -> Iterator[Any]:
    for chunk in chunks(batches, rows):
        size = sum(written_bytes(column) for column in chunk.columns)
        portion = -(-chunk.num_rows // max(1, -(-size // nbytes)))
        yield from (chunk.slice(at, portion) for at in range(0, chunk.num_rows, portion))


def _swap(
    store: EventStore, made: list[int], headers: list[tuple[bytes, bytes]], count: int, wanted: Wanted, order: int
) -> None:
    (_, manifest, _), upto = store.parts, wanted.upto
    meta, blocks, files = manifest.read()
    blocks = [block for block in blocks if block.order < order]
    batch = WriteBatch()
    for block in blocks:
        batch.delete(event_header_key(store.schema.id, block.order))
    for file in files:
        manifest.delete(batch, file)
    for key, header in headers:
        batch.put(key, header)
    new = set(made)
    meta.dead = [data for data in meta.dead if data not in new]
    meta.rows += max(0, count - _rows(blocks))
    meta.upto = max(meta.upto, upto)
    meta.manifest += bool(files)
    if wanted.hidden is not None and (floor := meta.floor_at(upto)) is not None:
        meta.dropped = max(meta.dropped, min(cts for cts, time in meta.floors if time == floor))
        meta.lost = max(meta.lost, wanted.hidden())
        meta.floors = [(cts, time) for cts, time in meta.floors if cts >= meta.dropped]
    retracted = [one[0] for one in meta.retractions if one[0] <= upto]
    meta.blanked = max([meta.blanked, *retracted])
    meta.retractions = [(*one[:-1], one[-1] or one[0] <= upto) for one in meta.retractions]
    data = [data for block in blocks for data in data_of(block)]
    data += [data for file in files for data in file.erased_data]
    store.retire(meta, data, files, batch)


def _rows(blocks: list[Block]) -> int:
    return sum(block.rows for block in blocks)
