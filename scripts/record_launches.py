"""Run every launch of `launches.py` and record its variables, for `test_detection.py`.

    python scripts/record_launches.py [--horovodrun PATH] [--sshd PATH] [--to FOLDER] [NAME ...]

The script starts a separate sandbox. Launches that require horovodrun or sshd keep their old recording if the
program is not given. A recording is a JSON file with the command, the versions of the programs and the common
variables of all processes. For each process, it contains the additional variables and the true rank.

Only variables of schedulers, launchers and devices are kept (`_KEPT`), without data of the machine. In their
values, the host name is replaced with `host`, the user with `user`, and absolute paths with `/path`.
Addresses other than loopback are replaced with 192.0.2.1, and values of secret variables (`_SECRET`) with
`secret`.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers import launches
from helpers.commands import environment, run_command
from helpers.launch_runner import PROBE, RECORDINGS, Launch, Process, run
from helpers.waiting import wait_for

from hpctrain import sandbox

_KEPT = re.compile(
    r"SLURM|SRUN_|SALLOC_|SBATCH_|PMI|OMPI_|PRTE_|MPI|HYD|I_MPI_|HOROVOD_|SUBMITIT_|TORCHELASTIC_|PET_"
    r"|(LOCAL_|NODE_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_|CUDA_VISIBLE_DEVICES$|GPU_|ROCR_|ZE_|PWD$"
    r"|ENVIRONMENT$"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|JWT|precondition_transports")
_PATH = re.compile(r"(?<![\w/:.])/[\w.+@%-]+(?:/[\w.+@%-]*)*")
_IPV4 = re.compile(r"\b(?!127\.)\d+\.\d+\.\d+\.\d+\b")
_IPV6 = re.compile(r"\[[0-9a-f]*:[0-9a-f:.]*\]")


def scrubbed(variables: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the `variables` to record; variables from `before` the launch are excluded."""
    kept = {}
    for name, value in sorted(variables.items() - before.items()):
        if not _KEPT.match(name):
            continue
        if _SECRET.search(name):
            value = "secret"
        value = _PATH.sub("/path", value)
        value = _IPV6.sub("[2001:db8::1]", _IPV4.sub("192.0.2.1", value))
        value = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", value)
        kept[name] = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "user", value)
    return kept


def recording(
    launch: Launch, processes: list[Process], words: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, object]:
    """Return the document of a launch."""
    variables = [scrubbed(process.variables, environment(env)) for process in processes]
    common = dict(set.intersection(*(set(each.items()) for each in variables)))
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in launch.env.items())
    return {
        "launch": launch.name,
        "command": prefix + launch.command,
        "with": versions(launch, words, env),
        "common": dict(sorted(common.items())),
        "processes": [
            {"truth": process.truth, "own": dict(sorted(each.items() - common.items()))}
            for process, each in zip(processes, variables, strict=True)
        ],
    }


def versions(launch: Launch, words: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the programs."""
    horovodrun = words.get("HOROVODRUN", "")
    commands = {
        "Slurm": (launch.needs_slurm, ["srun", "--version"]),
        "Open MPI": ("openmpi" in launch.command, ["mpirun.openmpi", "--version"]),
        "MPICH": ("mpich" in launch.command, ["mpichversion"]),
        "Horovod": ("HOROVODRUN" in launch.command, [horovodrun, "--version"]),
    }
    found = {
        name: re.search(r"\d+\.[\w.]+", run_command(argv, env).stdout)[0]  # type: ignore[index]
        for name, (used, argv) in commands.items()
        if used
    }
    packages = {"torch": "TORCHRUN", "submitit": "SUBMITIT"}
    return found | {name: version(name) for name, word in packages.items() if word in launch.command}


@contextlib.contextmanager
def ssh_server(sshd: str) -> Iterator[str]:
    """Start an SSH server that accepts SLURM* variables, as many sites do; yields the client's command."""
    with tempfile.TemporaryDirectory() as folder:
        for key in ("host", "user"):
            run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{key}"])
        Path("/run/sshd").mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {
            "Port": port,
            "ListenAddress": "127.0.0.1",
            "AuthorizedKeysFile": f"{folder}/user.pub",
            "AcceptEnv": "SLURM*",
            "StrictModes": "no",
            "PidFile": "none",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        server = subprocess.Popen(
            [sshd, "-D", "-f", "/dev/null", "-h", f"{folder}/host", *words], env=environment()
        )
        try:
            wait_for(lambda: _answers(port), 10, "sshd")
            known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
            yield f"ssh -q -p {port} -i {folder}/user {known}"
        finally:
            server.terminate()
            server.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def main(argv: list[str]) -> None:
    """Record the launches in `argv`, or all launches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--horovodrun", type=Path, help="path of horovodrun, in a venv with Horovod 0.28.1")
    parser.add_argument("--sshd", help="path of sshd")
    parser.add_argument("--to", type=Path, default=RECORDINGS, help="folder of the recordings")
    parser.add_argument("names", nargs="*", default=list(launches.ALL))
    asked = parser.parse_args(argv)
    words: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if asked.horovodrun:
            words = {
                "HOROVODRUN": str(asked.horovodrun),
                "HOROVOD_PROBE": f"{asked.horovodrun.with_name('python')} {PROBE}",
            }
        if asked.sshd:
            words["SSH"] = stack.enter_context(ssh_server(asked.sshd))
        box = sandbox.up("rec", nodes=4, gpus_per_node=2, cpus_per_node=8)
        stack.callback(box.down)
        for name in asked.names:
            launch = launches.ALL[name]
            missing = [word for word in ("HOROVODRUN", "SSH") if re.search(rf"\b{word}\b", launch.command)]
            if not words.keys() >= set(missing):
                print(f"{name}: not recorded, because it requires {missing}")
                continue
            with tempfile.TemporaryDirectory() as folder:
                processes = run(launch, Path(folder), box.env, box.nodes, words)
            text = json.dumps(recording(launch, processes, words, box.env), indent=1)
            (asked.to / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{name}: {len(processes)} processes")


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1:])
