#!/bin/sh
# Makes sure that the tests find a Slurm to start, MPI, a browser, and what makes network namespaces. Where these
# cannot be had, tests are skipped; with CI=true that is a failure.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"

missing() {
    for program; do
        command -v "$program" >/dev/null || return 0
    done
    return 1
}

provide() { # NAME PACKAGE...
    name=$1
    shift
    if scripts/apt_install.sh "$@"; then return; fi
    if [ "${CI:-}" = true ]; then
        echo "CI=true, and $name cannot be had: see above" >&2
        exit 1
    fi
    echo "$name cannot be had here: the tests that need it will be skipped" >&2
}

if missing slurmctld slurmd munged; then provide Slurm slurm-wlm munge; fi
# These two packages of MariaDB start no server of the machine's own, as mariadb-server does.
if missing slurmdbd mariadbd my_print_defaults; then
    provide "Slurm's accounting" slurmdbd mariadb-server-core mariadb-client
fi
if missing mpirun.openmpi mpiexec.mpich; then provide MPI openmpi-bin mpich; fi
if missing sshd rsync; then provide "sshd, to which the tests log in," openssh-server rsync; fi
if missing g++; then provide "the compiler that torch.compile uses on CPUs" g++; fi
if missing strace; then provide "strace, which kills at system calls," strace; fi
if missing etcd; then provide "etcd, at which agents of torchrun meet," etcd-server; fi
if missing chromium-headless-shell && missing chromium && missing google-chrome; then
    provide "a browser for reports" chromium-headless-shell
fi
if missing ip unshare; then provide "network namespaces" iproute2 util-linux; fi
if ! ls /usr/lib/*/libpmix.so >/dev/null 2>&1; then provide "PMIx, which Slurm's MPI plugin loads," libpmix-dev; fi
if missing zsh fish; then provide "shells that complete commands" zsh fish; fi
