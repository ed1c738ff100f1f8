#!/bin/sh
# Builds Horovod 0.28.1 from its source and installs it, into .venv or where the argument says. Takes minutes.
#
# Its source asks for C++14, and PyTorch's headers for C++20: two lines of it are changed before it is built.
# What was built is kept, so that another environment with the same Python and PyTorch gets it at once.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
version=0.28.1

if ! command -v "$python" >/dev/null; then
    echo "install_horovod: there is no $python: run make check first, or name a Python with PyTorch" >&2
    exit 1
fi
of_both='import sys, torch; print(sys.implementation.cache_tag, torch.__version__, sep="-torch-")'
if ! built_for=$("$python" -c "$of_both" 2>/dev/null); then
    echo "install_horovod: $python has no PyTorch, for which Horovod is built: install torch there first" >&2
    exit 1
fi
# One that was built for another PyTorch is there, but cannot be imported.
if "$python" -c 'import horovod.torch' 2>/dev/null; then
    echo "Horovod is installed already"
    exit 0
fi

pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }
install() {
    pip install --no-deps --force-reinstall "$1"
    "$python" -c 'import horovod.torch as hvd; print("Horovod with gloo:", hvd.gloo_built())'
}

pip install -c constraints.txt setuptools wheel cloudpickle psutil pyyaml packaging cffi
kept=${XDG_CACHE_HOME:-$HOME/.cache}/hpctrain/horovod-$version-$built_for
for wheel in "$kept"/*.whl; do
    if [ -e "$wheel" ]; then
        echo "Installing $wheel, which was built before"
        if install "$wheel"; then exit 0; fi
        echo "install_horovod: that does not work here, so it is built anew" >&2
    fi
done

has_headers() { [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; }
missing=
for program in cmake g++ make; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
has_headers || missing="$missing python3-dev"
# shellcheck disable=SC2086 # several words
[ -z "$missing" ] || scripts/apt_install.sh $missing
if ! has_headers; then
    echo "install_horovod: $python has no Python.h beside it: install the headers of that Python" >&2
    exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip download --no-deps --no-build-isolation --no-binary :all: -d "$folder" "horovod==$version"
tar xzf "$folder/horovod-$version.tar.gz" -C "$folder"
source=$folder/horovod-$version
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
    "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"

echo "Building Horovod $version for $built_for, which takes minutes"
export CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="-include cstdint"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
if ! pip wheel --no-build-isolation --no-deps -w "$folder/built" "$source" >"$folder/log" 2>&1; then
    tail -n 40 "$folder/log" >&2
    echo "install_horovod: the build failed; its last lines are above" >&2
    exit 1
fi
install "$folder"/built/*.whl
mkdir -p "$kept" && cp "$folder"/built/*.whl "$kept/" || echo "install_horovod: it could not be kept in $kept" >&2
