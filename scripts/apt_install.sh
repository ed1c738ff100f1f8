#!/bin/sh
# Installs Debian packages if this user may: as root, or with a sudo that asks for no password.
# Exits 1, and says why in one line, where it cannot.
set -eu

if ! command -v apt-get >/dev/null; then
    echo "apt_install: no apt-get here, so $* must be installed by hand" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root="env"
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n env"
else
    echo "apt_install: not root and no passwordless sudo; run: sudo apt-get install $*" >&2
    exit 1
fi

install() {
    $as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

echo "Installing with apt-get: $*"
# A machine whose package lists are there needs no network for them; a bare one has none yet.
if install "$@" >/dev/null 2>&1; then exit 0; fi
$as_root apt-get update -qq </dev/null && install "$@" >/dev/null || {
    echo "apt_install: apt-get could not install $*" >&2
    exit 1
}
