#!/bin/sh
# The last line of `make test`: what was not tested, and how to test it. Takes the Python of the tests.
set -eu
words="the long tests (make test-long)"
has() { "$1" -c "$2" 2>/dev/null; }
if ! has "$1" 'import horovod.torch'; then
    words="$words; the Horovod strategy (scripts/install_horovod.sh builds it in some minutes, then make test)"
fi
if ! has "$1" 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    words="$words; GPUs (make test on a machine with one)"
fi
if [ -z "${CI:-}" ]; then
    words="$words; the extended tests (CI=true make test)"
fi
echo "Not tested: $words"
