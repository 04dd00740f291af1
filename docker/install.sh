#!/bin/sh
# What the image is made of, without an image: kivi in a virtual environment. Needs no rights beyond its directory.
#
#     docker/install.sh DIRECTORY [EXTRAS]        EXTRAS: as pip has them, such as spark,demo
#
# Versions are those of constraints.txt, by their hashes. PYTHON names the Python to use.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: $0 DIRECTORY [EXTRAS]" >&2
    exit 2
fi
target=$1
source=$(cd "$(dirname "$0")/.." && pwd)

"${PYTHON:-python3}" -m venv "$target"
PIP_NO_CACHE_DIR=1 "$target/bin/python" "$source/tools/install.py" --copied "${2:-}"
# The demonstration is no part of kivi's distribution: where its packages are asked for, it is put beside them.
case ",${2:-}," in
    *,demo,*) cp -R "$source/apm_demo" "$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" ;;
esac
"$target/bin/kivi" --help > /dev/null
