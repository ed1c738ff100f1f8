#!/bin/sh
# Makes a virtual environment with a version of torch, or the newest, and else the packages of .venv. Prints the
# path of its Python.
set -eu
cd "$(dirname "$0")/.."
folder=${XDG_CACHE_HOME:-$HOME/.cache}/hpctrain-torch/$1
requirement=torch==$1
[ "$1" = newest ] && requirement=torch

if ! [ -e "$folder/complete" ] || [ "$1" = newest ]; then
    rm -rf "$folder"
    .venv/bin/python -m venv "$folder"
    "$folder/bin/python" -m pip install --disable-pip-version-check "$requirement" >&2
    touch "$folder/complete"
fi
# Packages of the environment itself come first.
.venv/bin/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' \
    >"$(echo "$folder"/lib/python*/site-packages)/hpctrain_tests.pth"
echo "$folder/bin/python"
