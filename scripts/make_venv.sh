#!/bin/sh
# Makes the virtual environment .venv with hpctrain in it, editable, and the extras of the argument.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
    echo "There is no $python here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    found=$("$python" -c 'import platform; print(platform.python_version())')
    echo "hpctrain needs Python 3.11 or newer, but $python is $found." \
        "Name a newer one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    # Debian ships it apart from Python itself.
    scripts/apt_install.sh python3-venv
fi


echo "Making .venv with $python"
"$python" -m venv .venv
echo "Installing hpctrain and what it needs into .venv (PyTorch is large: this takes a few minutes)"
.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$1]"
