"""File operations and time of a rank's start, with and without a staged environment.

    python benchmarks/stage.py [--rounds N] [--module NAME]

A folder with a virtual environment, a script and the run represents the shared file system. strace counts the
operations of a rank on paths in this folder until PyTorch is imported. The time is that from the start of the
rank's process until PyTorch is imported.

A preloaded library simulates a slow file system: each call that opens, checks or lists a path in the folder
takes 2 ms longer. The library does not delay the loading of shared libraries.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from results import Results

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

FOLDER = Path(__file__).parents[1]
SCRIPT = """
import json, os, sys, time
import torch
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
started = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
with open(os.environ["RESULT"], "w") as file:
    json.dump({"pid": os.getpid(), "seconds": started, "prefix": sys.prefix, "module": torch.__file__,
               "script": __file__}, file)
"""
#: Functions of the C library that take a path, by the position of the path.
DELAYED = {"open": 0, "open64": 0, "fopen": 0, "fopen64": 0, "stat": 0, "stat64": 0, "lstat": 0, "lstat64": 0}
DELAYED |= {
    "access": 0,
    "readlink": 0,
    "opendir": 0,
    "openat": 1,
    "openat64": 1,
    "fstatat": 1,
    "fstatat64": 1,
}
#: Line of strace with the start of a process or thread.
CLONE = re.compile(r"^(\d+) .*\b(?:clone3?|v?fork)(?:\(.*| resumed>.*)= (\d+)$")
#: Packages that a run requires.
PACKAGES = (
    *("click", "cloudpickle", "jinja2", "msgspec", "nvidia-ml-py", "pyyaml", "rich", "safetensors"),
    *("submitit", "xxhash"),
)
EXTRAS = re.compile(r";.*\bextra\b")


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=3)
    results.parser.add_argument("--module", default="torch", help="module that the script imports")
    options = results.parse()
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder, "shared")
        make_environment(shared / "venv", [options.module, *PACKAGES])
        (shared / "code").mkdir()
        (shared / "code/train.py").write_text(SCRIPT.replace("torch", options.module))
        subprocess.run(["git", "init", "-q", shared / "code"], check=True)
        # Even without a delay, the library takes time.
        plain = {"LD_PRELOAD": str(build_delay(Path(folder))), "SLOW_FOLDER": "/nowhere/"}
        slow = plain | {"SLOW_FOLDER": f"{shared}/"}
        seconds: dict[str, list[float]] = {}
        start(shared, "staged-first", staged=True)
        for name, staged in (("shared", False), ("staged", True)):
            count = count_operations(start(shared, f"{name}-strace", staged=staged, traced=True), shared)
            limit = 50 if staged else None
            results.add(f"{name}: file operations of a rank", count, "", limit=limit, headline=staged)
        for number in range(options.rounds):
            for name, staged in (("shared", False), ("staged", True)):
                for delay, env in (("", plain), (", 2 ms per operation (simulated)", slow)):
                    found = start(shared, f"{name}-{bool(delay)}-{number}", staged=staged, env=env)
                    seconds.setdefault(name + delay, []).append(found["seconds"])
        for name, values in seconds.items():
            results.add(f"{name}: start", values, "s")
        delayed = [b / a for a, b in zip(seconds["staged"], list(seconds.values())[3], strict=True)]
        results.add("staged: start with ÷ without the delay", delayed, limit=1.1)
        staging = [
            event for run in shared.glob("runs/staged-*") for event in read_json_lines(RunDir(run).events)
        ]
        staging = [event["seconds"] for event in staging if event["kind"] == "staged"]
        results.add("first staging, which packs the environment", max(staging), "s")
        results.add("staging from the pack", min(staging), "s")
    results.finish()


def make_environment(folder: Path, packages: Iterable[str]) -> None:
    """Create a virtual environment with hpctrain, and packages and their requirements as hard links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    todo, found = list(packages), set[str]()
    while todo:
        name = re.split(r"[^A-Za-z0-9_.-]", todo.pop())[0].lower()
        if name in found:
            continue
        found.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # required on another platform
        todo += [required for required in package.requires or () if not EXTRAS.search(required)]
        for file in package.files or ():
            source, target = Path(str(package.locate_file(file))), site_packages / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(source, target)
                except OSError:
                    shutil.copy2(source, target)
    package = site_packages / "hpctrain"
    shutil.copytree(FOLDER / "hpctrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FOLDER / "slurm_templates", package / "slurm_templates")
    subprocess.run([folder / "bin/python", "-m", "compileall", "-q", package], check=True)


def build_delay(folder: Path) -> Path:
    """Compile the library that delays calls by 2 ms."""
    lines = ["#define _GNU_SOURCE", "#include <dlfcn.h>", "#include <stdlib.h>", "#include <string.h>"]
    lines += ["int usleep(unsigned);", "typedef long (*call)(long, long, long, long);"]
    for name, position in DELAYED.items():
        lines += [
            f"long {name}(long a, long b, long c, long d) {{",
            f'  const char *path = (const char *){"ab"[position]}, *folder = getenv("SLOW_FOLDER");',
            "  if (path && folder && !strncmp(path, folder, strlen(folder))) usleep(2000);",
            f'  return ((call)dlsym(RTLD_NEXT, "{name}"))(a, b, c, d);',
            "}",
        ]
    source, library = folder / "delay.c", folder / "delay.so"
    source.write_text("\n".join(lines))
    command = ["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-w", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


def start(
    shared: Path, name: str, *, staged: bool, traced: bool = False, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Train with one rank. Returns the result of the script; with `traced`, also the path of the trace."""
    python = shared / "venv/bin/python"
    run, base = shared / "runs" / name, shared.parent / name
    result, trace = base.with_suffix(".json"), base.with_suffix(".strace")
    command = [python, "-m", "hpctrain", "submit", "--backend", "local", "--run-dir", run]
    command += ["--standby-workers", "never", "--env", f"RESULT={result}"]
    for variable, value in (env or {}).items():
        command += ["--env", f"{variable}={value}"]
    command += ["--stage-environment"] if staged else []
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=%file,%process", "-o", trace]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    where = {"cwd": shared / "code", "env": {**kept, "TMPDIR": str(shared.parent)}}
    subprocess.run([*(strace if traced else []), *command, "train.py"], check=True, **where)
    subprocess.run([python, "-m", "hpctrain", "wait", run], check=True, **where)
    return {**json.loads(result.read_text()), "trace": trace, "result": result}


def count_operations(found: dict[str, Any], shared: Path) -> int:
    """Count the system calls of a rank with a path in `shared`, or a relative path."""
    lines = Path(found["trace"]).read_text(errors="replace").splitlines()
    own = {str(found["pid"])}
    for line in lines:
        if (match := CLONE.match(line)) and match[1] in own:
            own.add(match[2])
    path = re.compile(rf'"{re.escape(str(shared))}[/"]|\((?:AT_FDCWD, )?"(?!/)')
    begun, count = False, 0
    for line in lines:
        pid, _, call = line.partition(" ")
        if pid in own and ("hpctrain.runtime.worker" in call or begun):
            begun = True
            count += bool(path.search(call)) and "resumed>" not in call
            if str(found["result"]) in call:
                break
    return count


if __name__ == "__main__":
    main()
