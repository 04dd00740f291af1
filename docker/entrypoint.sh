#!/bin/sh
# The image's entry point. Without arguments it serves; settings are KIVI_* variables (`kivi serve --print-settings`).
#
#     docker run kivi                      kivi serve
#     docker run kivi status               any other command of kivi
#     docker run kivi python -m apm_demo   any program of the image
set -eu

if [ $# -eq 0 ]; then
    set -- serve
fi
case $1 in
    python | sh) exec "$@" ;;
    serve)
        data=${KIVI_DATA:-/data}
        if ! { mkdir -p "$data" && [ -w "$data" ]; } 2> /dev/null; then
            echo "kivi: user $(id -u) cannot write to $data: mount a volume there that belongs to that user" >&2
            exit 1
        fi
        export KIVI_DATA="$data"
        ;;
esac
exec kivi "$@"
