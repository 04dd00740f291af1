"""Generates ``kivi/wire/v1`` from the protos beside this file: ``python proto/generate.py [target folder]``.

protoc names generated modules by the protos' paths (``kivi.v1``), and the package that holds them is
``kivi.wire.v1``: the one thing rewritten here is that prefix in their imports. gRPC stubs are not
generated: the clients and the server name the methods themselves (``kivi/wire/methods.py``), because
a session's frames are passed through gRPC as bytes and parsed off the event loop.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
HEADER = '"""Generated from proto/kivi/v1 by proto/generate.py; never edited."""\n'


def generate(target: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kivi/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        include = Path(protoc.__file__).parent / "_proto"
        arguments = ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={scratch}", f"--pyi_out={scratch}"]
        if protoc.main([*arguments, *protos]) != 0:
            raise SystemExit("protoc failed")
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text(HEADER)
        for path in sorted(Path(scratch, "kivi", "v1").iterdir()):
            text = re.sub(r"^from kivi\.v1 import", "from kivi.wire.v1 import", path.read_text(), flags=re.M)
            (target / path.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "kivi" / "wire" / "v1")
