"""``python -m tests.fuzz [TARGET ...] --minutes 10``: looks for bytes that a target does not take, one after the other.

Each runs in a process of its own, since Atheris ends its process, from its seeds and its corpus. What was new goes to
the corpus, one input for what no other reaches. What was not taken is printed, and written to
``build/fuzz``. Exit code 1 if there was any.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPORA = Path(__file__).resolve().parent / "corpora"
FOUND = ROOT / "build" / "fuzz"
_INPUT_BYTES_MAX = 4096


def inputs(target: str) -> dict[str, bytes]:
    """The kept inputs of a target, by name."""
    path = CORPORA / f"{target}.zip"
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _keep(target: str, folder: Path) -> int:
    """The archive has the files of the folder, in an order of their own, and no times."""
    files = sorted(folder.iterdir())
    with zipfile.ZipFile(CORPORA / f"{target}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return len(files)


def _fuzz(target: str, arguments: list[str]) -> int:
    """In a process of its own: libFuzzer's arguments follow. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["kivi", "kivi_server"]):
        from tests.fuzz.targets import TARGETS
    read = TARGETS[target].read
    atheris.Setup([sys.argv[0], *arguments], lambda data: read(bytes(data)))
    atheris.Fuzz()
    return 0


def _run(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--in-process", target, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def search(target: str, seconds: float) -> bool:
    """Whether nothing was found. Prints what was."""
    from tests.fuzz.targets import TARGETS

    with tempfile.TemporaryDirectory() as work:
        known = Path(work)
        for name, data in {**inputs(target), **{f"seed{i}": s for i, s in enumerate(TARGETS[target].seeds)}}.items():
            (known / name).write_bytes(data)
        FOUND.mkdir(parents=True, exist_ok=True)
        limits = [f"-max_len={_INPUT_BYTES_MAX}", "-timeout=20", "-rss_limit_mb=3000", "-reduce_inputs=1"]
        ran = _run(
            target,
            f"-max_total_time={int(seconds)}",
            "-verbosity=0",
            "-print_final_stats=1",
            f"-artifact_prefix={FOUND}/{target}-",
            *limits,
            str(known),
        )
        kept = _keep(target, known)
        tried = [line.split()[-1] for line in ran.stderr.splitlines() if "number_of_executed_units" in line]
        print(f"{target}: {' '.join(tried) or '?'} tried, {kept} kept", flush=True)
    if ran.returncode != 0:
        print(ran.stdout[-4000:], ran.stderr[-4000:], sep="\n", flush=True)
    return ran.returncode == 0


def main() -> int:
    if sys.argv[1:2] == ["--in-process"]:
        return _fuzz(sys.argv[2], sys.argv[3:])
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Coverage-guided fuzzing with Atheris.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each")
    options = parser.parse_args()
    good = [search(target, options.minutes * 60) for target in options.targets or TARGETS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
