"""How far a node has come, on disk by itself: what the log may not have lost when all nodes are started again.

Base keeps the place of what is folded, which may be minutes old. A node that begins again there, with a log that has
lost what came after it, would not notice: nor would any other one, if all of them were killed. So the place is written
here, too, once a second, and synced. It is a place that this node had applied, so a log that is whole reaches it, with
the same running hash; one that does not has lost what it had acknowledged (``kivi.log.replicated``), whatever was
acknowledged a second or more before the node ended.

The file is of one generation of the log: what an earlier one had says nothing of another. No copy of a node has it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Final

from kivi.errors import DataLoss
from kivi.log.replicated import Place
from kivi.runtime.files import write_json

__all__ = ["Reached"]

_NAME: Final = "reached"


@dataclass(slots=True)
class Reached:
    """``path``: the node's directory. One thread at a time."""

    path: str
    generation: bytes
    _noted: int = field(init=False, default=0)

    def read(self) -> tuple[int, bytes]:
        """Which message it had applied, and the running hash there; (0, b"") if that is not known. Raises DataLoss."""
        file = os.path.join(self.path, _NAME)
        try:
            with open(file, encoding="utf-8") as opened:
                found = json.load(opened)
            if found["generation"] != self.generation.hex():
                return 0, b""
            self._noted = int(found["sequence"])
            return self._noted, bytes.fromhex(found["hash"])
        except FileNotFoundError:
            return 0, b""
        except (ValueError, KeyError, TypeError) as error:
            raise DataLoss(f"{file} is damaged ({error}): make the node anew from a copy of another one") from None

    def note(self, at: Place) -> None:
        """Once it returns the node knows of this place after a crash, too. Raises OSError."""
        if at.sequence == self._noted:
            return
        file = os.path.join(self.path, _NAME)
        content = {"generation": self.generation.hex(), "sequence": at.sequence, "hash": at.hash.hex()}
        write_json(file, content, partial=file + ".new")
        self._noted = at.sequence
