"""A fake container: no image is unpacked, but mounts and variables are like those of a real one.

The "image" is a JSON file: `env`, its variables, and `hidden`, folders of the host that it lacks; only mounts
are visible there. Run as

    fake_container.py apptainer exec …      apptainer's arguments, with its rules for variables
    fake_container.py srun …                srun with pyxis, whose --container-… options are removed
    fake_container.py task JSON COMMAND …   the command that the latter starts in each task
"""

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
    args = [word for folder in system["hidden"] for word in ("hide", folder)]
    for mount in mounts:
        source, destination, mode = [*mount.split(":"), "rw"][:3]
        args += ["show", source, destination, mode]
    settings = [f"{name}={value}" for name, value in variables(system["env"]).items()]
    root = tempfile.mkdtemp(dir=os.path.dirname(image))
    inside = ["/usr/bin/env", "-i", "-C", workdir, *settings, *command]
    args = ["unshare", "--mount", "/bin/sh", "-c", _SHELL, "sh", root, *args, "--", *inside]
    os.execvp(args[0], args)


def apptainer(args: list[str]) -> None:
    assert args.pop(0) == "exec", args
    mounts, workdir = [], "/"
    while args[0].startswith("--"):
        option = args.pop(0)
        if option == "--bind":
            mounts.append(args.pop(0))
        elif option == "--pwd":
            workdir = args.pop(0)
        else:
            assert option == "--nv", option

    def variables(image_env):
        prefix = "APPTAINERENV_"
        host = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
        forced = {name[len(prefix) :]: value for name, value in os.environ.items() if name.startswith(prefix)}
        return {**host, **image_env, **forced}

    run(args[0], mounts, workdir, variables, args[1:])


def srun(args: list[str]) -> None:
    own_folder = os.path.dirname(os.path.realpath(shutil.which("srun")))
    search_path = os.pathsep.join(
        path for path in os.environ["PATH"].split(os.pathsep) if os.path.realpath(path) != own_folder
    )
    real = shutil.which("srun", path=search_path)
    if args == ["--help"]:
        print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
        sys.exit()
    count = next(i for i, word in enumerate(args) if not word.startswith("--"))
    options, command = args[:count], args[count:]
    container_options = dict(option.split("=", 1) for option in options if option.startswith("--container-"))
    options = [option for option in options if not option.startswith("--container-")]
    if container_options:
        this_file = os.path.realpath(__file__)
        command = [sys.executable, this_file, "task", json.dumps(container_options), *command]
    os.execv(real, [real, *options, *command])


def task(args: list[str]) -> None:
    options = json.loads(args[0])

    def variables(image_env):
        names = options["--container-env"].split(",")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {**os.environ, **image_env, **kept}

    mounts = options["--container-mounts"].split(",")
    run(options["--container-image"], mounts, options["--container-workdir"], variables, args[1:])


if __name__ == "__main__":
    {"apptainer": apptainer, "srun": srun, "task": task}[sys.argv[1]](sys.argv[2:])
