"""The pages of a scan, decoded: Arrow IPC streams, and row groups of Parquet files as they lie at the server."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kivi.client.messages import read_batches
from kivi.errors import DataLoss
from kivi.wire.frames import Bodies

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.client.steps import Page
    from kivi.wire.v1 import session_pb2

__all__ = ["PageReader"]


class PageReader:
    """Decodes the pages of one scan, in their order. For one thread at a time."""

    def __init__(self) -> None:
        # Of the largest file so far, and used again: new memory takes longer to be touched than to be copied into.
        self._memory = memoryview(b"")
        self._file: Any = None
        self._names: list[str] = []

    def batches(self, page: Page) -> Iterator[pa.RecordBatch]:
        """Each is decoded when it is asked for. Raises DataLoss."""
        if not page.row_groups:
            yield from read_batches(page.arrow)
            return
        bodies = Bodies(memoryview(page.arrow))
        for group in page.row_groups:
            yield self._decoded(group, bodies)

    def _decoded(self, group: session_pb2.RowGroup, bodies: Bodies) -> pa.RecordBatch:
        """The rows of a row group; its bodies are the next ones."""
        import pyarrow as pa

        from kivi.arrow.parquet import FAILURES, StoredFile, parsed, whole

        try:
            if group.footer_bytes:
                footer = parsed(bodies.take(group.footer_bytes))
                if len(self._memory) < group.file_bytes:
                    self._memory = memoryview(mmap.mmap(-1, group.file_bytes))  # what is not touched costs nothing
                self._file = StoredFile(self._memory[: group.file_bytes], footer)
                self._names = footer.schema.names
            for at, size in zip(group.chunk_offsets, group.chunk_bytes, strict=True):
                self._memory[at : at + size] = bodies.take(size)
            found = self._file.read([group.index], group.columns)
            names = [self._names[number] for number in group.columns]
            batch = pa.RecordBatch.from_arrays([whole(found[number]) for number in group.columns], names)
        except (*FAILURES, IndexError) as error:
            raise DataLoss(f"{group.name} cannot be read: {error}", path=group.name) from None
        if batch.num_rows != group.rows:
            said = f"a row group has {batch.num_rows} events, and not {group.rows}"
            raise DataLoss(f"{group.name} cannot be read: {said}", path=group.name)
        return batch
