#!/bin/sh
# Builds Horovod 0.28.1 from its source and installs it, into .venv or where the argument says. Takes minutes.
#
# Its source asks for C++14, and PyTorch's headers for C++20: two lines of it are changed before it is built.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
version=0.28.1

if "$python" -c 'import horovod.torch' 2>/dev/null; then
    echo "Horovod is installed already"
    exit 0
fi
if ! command -v cmake >/dev/null || ! command -v g++ >/dev/null || ! command -v make >/dev/null; then
    scripts/apt_install.sh cmake g++ make
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }
pip install -c constraints.txt setuptools wheel cloudpickle psutil pyyaml packaging cffi
pip download --no-deps --no-build-isolation --no-binary :all: -d "$folder" "horovod==$version"
tar xzf "$folder/horovod-$version.tar.gz" -C "$folder"
source=$folder/horovod-$version
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
    "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"

echo "Building Horovod $version"
export CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="-include cstdint"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
pip install --no-build-isolation --no-deps "$source"
"$python" -c 'import horovod.torch as hvd; print("Horovod with gloo:", hvd.gloo_built())'
