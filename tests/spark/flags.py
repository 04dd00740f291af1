"""How the Java of every Spark driver that the tests start is told to be brief: ``tests/conftest.py`` puts it into the
environment, which all of them inherit, the demonstration's and those of the documentation's examples as well."""

from __future__ import annotations

from typing import Final

# Tests end before the second compiler of Java would pay off, and have little garbage to collect. Spark's classes are
# believed to be well-formed, as Java's own are: to verify them is an eighth of what its start takes.
JAVA_FLAGS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m"
    " -XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
