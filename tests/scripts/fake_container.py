"""A container that only pretends: no image is unpacked, but mounts and variables are as in a real one.

The "image" is a file of JSON: `env`, its variables, and `hidden`, folders of the host that it has not; only
what is mounted is seen there. Run as

    fake_container.py apptainer exec …      what apptainer would be told, with its rules for variables
    fake_container.py srun …                srun with pyxis: options of --container-… are taken off
    fake_container.py task JSON COMMAND …   what the latter starts in each task
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile

_SHELL = """
set -e
root=$1; shift
mount --rbind / "$root"
while [ "$1" != -- ]; do
    case $1 in
        hide) mkdir -p "$root$2"; mount -t tmpfs none "$root$2"; shift 2 ;;
        show) mkdir -p "$root$3"; mount --bind "$2" "$root$3"
              [ "$4" != ro ] || mount -o remount,bind,ro "$root$3"; shift 4 ;;
    esac
done
shift
exec chroot "$root" "$@"
"""


def run(image, mounts, workdir, variables, command) -> None:
    with open(image) as file:
        system = json.load(file)
    words = [word for folder in system["hidden"] for word in ("hide", folder)]
    for mount in mounts:
        source, destination, mode = [*mount.split(":"), "rw"][:3]
        words += ["show", source, destination, mode]
    settings = [f"{name}={value}" for name, value in variables(system["env"]).items()]
    root = tempfile.mkdtemp(dir=os.path.dirname(image))
    inside = ["/usr/bin/env", "-i", "-C", workdir, *settings, *command]
    words = ["unshare", "--mount", "/bin/sh", "-c", _SHELL, "sh", root, *words, "--", *inside]
    os.execvp(words[0], words)


def apptainer(words: list[str]) -> None:
    assert words.pop(0) == "exec", words
    mounts, workdir = [], "/"
    while words[0].startswith("--"):
        option = words.pop(0)
        if option == "--bind":
            mounts.append(words.pop(0))
        elif option == "--pwd":
            workdir = words.pop(0)
        else:
            assert option == "--nv", option

    def variables(of_image):
        prefix = "APPTAINERENV_"
        host = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
        forced = {name[len(prefix) :]: value for name, value in os.environ.items() if name.startswith(prefix)}
        return {**host, **of_image, **forced}

    run(words[0], mounts, workdir, variables, words[1:])


def srun(words: list[str]) -> None:
    own = os.path.dirname(os.path.realpath(shutil.which("srun")))
    rest = os.pathsep.join(
        path for path in os.environ["PATH"].split(os.pathsep) if os.path.realpath(path) != own
    )
    real = shutil.which("srun", path=rest)
    if words == ["--help"]:
        print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
        sys.exit()
    count = next(i for i, word in enumerate(words) if not word.startswith("--"))
    options, command = words[:count], words[count:]
    asked = dict(option.split("=", 1) for option in options if option.startswith("--container-"))
    options = [option for option in options if not option.startswith("--container-")]
    if asked:
        command = [sys.executable, os.path.realpath(__file__), "task", json.dumps(asked), *command]
    os.execv(real, [real, *options, *command])


def task(words: list[str]) -> None:
    asked = json.loads(words[0])

    def variables(of_image):
        names = asked["--container-env"].split(",")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {**os.environ, **of_image, **kept}

    mounts = asked["--container-mounts"].split(",")
    run(asked["--container-image"], mounts, asked["--container-workdir"], variables, words[1:])


if __name__ == "__main__":
    {"apptainer": apptainer, "srun": srun, "task": task}[sys.argv[1]](sys.argv[2:])
