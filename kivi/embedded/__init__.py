"""The store in this process, behind the public interface: ``kivi.open``.

Comes in: the public arguments. Goes out: answers in the caller's form. May not touch: the wire. It converts and holds
no rules: those are in ``kivi.store`` and below. Begin reading at ``database``.
"""

from __future__ import annotations

from kivi.embedded.database import Database, Snapshot, Transaction, open_database

__all__ = ["Database", "Snapshot", "Transaction", "open_database"]
