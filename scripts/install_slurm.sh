#!/bin/sh
# Makes sure that the tests find a Slurm to start. Without one they are skipped, with CI=true they fail.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"

missing() {
    for program; do
        command -v "$program" >/dev/null || return 0
    done
    return 1
}

packages=""
if missing slurmctld slurmd munged; then packages="slurm-wlm munge"; fi
# These two packages of MariaDB start no server of the machine's own, as mariadb-server does.
if missing slurmdbd mariadbd my_print_defaults; then
    packages="$packages slurmdbd mariadb-server-core mariadb-client"
fi
# shellcheck disable=SC2086 # a list of words
if [ -z "$packages" ] || scripts/apt_install.sh $packages; then exit 0; fi
if [ "${CI:-}" = true ]; then
    echo "CI=true, and Slurm cannot be had: see above" >&2
    exit 1
fi
echo "Slurm cannot be had here: the tests that need it will be skipped" >&2
