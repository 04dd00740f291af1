#!/bin/sh
# What the image is made of, without an image: kivi in a virtual environment. Needs no rights beyond its directory.
#
#     docker/install.sh DIRECTORY [EXTRAS]        EXTRAS: as pip has them, such as spark,demo
#
# Versions are those of constraints.txt. PYTHON names the Python to use.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: $0 DIRECTORY [EXTRAS]" >&2
    exit 2
fi
target=$1
extras=${2:+"[$2]"}
source=$(cd "$(dirname "$0")/.." && pwd)

"${PYTHON:-python3}" -m venv "$target"
pip() { "$target/bin/python" -m pip --disable-pip-version-check --no-input --no-cache-dir "$@"; }
pip install -qq -c "$source/constraints.txt" pip setuptools
# Built from a copy: what is installed from may be read only, and nothing is left behind in it.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for each in pyproject.toml setup.py README.md kivi server; do
    cp -R "$source/$each" "$work/"
done
pip install -qq -c "$source/constraints.txt" --no-build-isolation "$work$extras"
# The demonstration is no part of kivi's distribution: where its packages are asked for, it is put beside them.
case ",${2:-}," in
    *,demo,*) cp -R "$source/apm_demo" "$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" ;;
esac
"$target/bin/kivi" --help > /dev/null
