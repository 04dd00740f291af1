"""Authorities and certificates for tests, made by openssl: who shows which, and whose it is."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import require

__all__ = ["Authority", "Pair"]


@dataclass(frozen=True)
class Pair:
    """Files: a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """One that signs certificates of hosts, all in the directory ``path``."""

    def __init__(self, path: Path, name: str = "authority") -> None:
        self._path = path
        self._own = _made(path, name, "-addext", "basicConstraints=critical,CA:TRUE")
        self.ca = self._own.cert

    def signs(self, name: str, hosts: str = "IP:127.0.0.1,DNS:localhost", *extensions: str, days: int = 1) -> Pair:
        """``hosts`` as openssl writes names; ``extensions`` likewise."""
        added = [part for each in (f"subjectAltName={hosts}", *extensions) for part in ("-addext", each)]
        return _made(
            self._path, name, "-CA", str(self._own.cert), "-CAkey", str(self._own.key),
            "-addext", "basicConstraints=critical,CA:FALSE", *added, days=days,
        )  # fmt: skip


def _made(path: Path, name: str, *arguments: str, days: int = 1) -> Pair:
    pair = Pair(path / f"{name}.pem", path / f"{name}.key")
    subprocess.run(
        [
            require("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", str(days), "-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(pair.cert), *arguments,
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return pair
