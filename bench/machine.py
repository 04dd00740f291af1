"""The machine, the versions and the disk: what a figure cannot be read without."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.sheet import percentile

__all__ = ["describe", "filesystem", "sync_p50_s"]

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("grpcio", "numpy", "protobuf", "pyarrow", "rocksdict")


def describe(disk: Path) -> dict[str, Any]:
    """Plain data, for the raw results."""
    return {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(disk),
        "sync_p50_us": round(sync_p50_s(disk) * 1e6),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }


def filesystem(path: Path) -> str:
    """The type of file system ``path`` is on. In memory (tmpfs) a sync costs nothing, and figures mean nothing."""
    best, kind = "", "unknown"
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, this, *_ = line.split()
            if len(point) >= len(best) and path.resolve().is_relative_to(point):
                best, kind = point, this
    return kind


def sync_p50_s(disk: Path, count: int = 200, size: int = 256) -> float:
    """One small record made durable: pwrite and fdatasync in a preallocated file, one after the other; the median."""
    path = disk / "sync"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, size * count)
        os.fsync(fd)
        data, took = os.urandom(size), []
        for i in range(count):
            began = time.perf_counter()
            os.pwrite(fd, data, i * size)
            os.fdatasync(fd)
            took.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
    return percentile(took, 50)


def _field(path: str, name: str) -> str:
    with open(path) as file:
        for line in file:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()
