#!/bin/sh
# Makes sure that the tests find a Slurm to start. Without one they are skipped, with CI=true they fail.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"

for daemon in slurmctld slurmd munged; do
    if ! command -v "$daemon" >/dev/null; then
        if scripts/apt_install.sh slurm-wlm munge; then exit 0; fi
        if [ "${CI:-}" = true ]; then
            echo "CI=true, and Slurm cannot be had: see above" >&2
            exit 1
        fi
        echo "Slurm cannot be had here: the tests that need it will be skipped" >&2
        exit 0
    fi
done
