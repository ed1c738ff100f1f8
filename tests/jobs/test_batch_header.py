"""The header of an adopted batch script, compared with sbatch itself."""

import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.commands import environment, run_command

from hpctrain.errors import SpecError
from hpctrain.jobs.options.batch_options import BatchScript, build_batch_spec
from hpctrain.jobs.options.resolved_options import resolve_options
from hpctrain.jobs.submit.preflight import _check_output_folders
from hpctrain.jobs.submit.render import render
from hpctrain.jobspec.job_directives import job_directives
from hpctrain.slurm.batch_header import parse_batch_header, shell_of

#: Values of options that the test cluster accepts; None for a flag.
TEXTS = ["a", "two words", "it's", "x # y", 'say "no"', "back\\slash", "a=b,c", "#", "é"]
VALUES: dict[str, list[str | None]] = {
    "nodes": ["1", "2", "1-2"],
    "ntasks": ["1", "2", "4"],
    "ntasks-per-node": ["1", "2"],
    "cpus-per-task": ["1", "2"],
    "time": ["5", "00:10:00", "1-0", "0-2:30", "10:30", "2:00"],
    "time-min": ["4"],
    "job-name": [text for text in TEXTS if "\\" not in text],
    "comment": list(TEXTS),
    "mem": ["100", "1G"],
    "mem-per-cpu": ["50M"],
    "gres": ["gpu:1", "gpu:2"],
    "gpus-per-node": ["1"],
    "gpus": ["2"],
    "partition": ["preemptible", "urgent"],
    "exclusive": [None, "user"],
    "oversubscribe": [None],
    "overcommit": [None],
    "contiguous": [None],
    "hold": [None],
    "nice": [None, "5"],
    "begin": ["2099-01-02T03:04:05"],
    "deadline": ["2099-02-03T04:05:06"],
    "mail-type": ["END", "FAIL,END"],
    "mail-user": ["me@example.org"],
    "output": ["out-%j.txt", "logs/%x.%j", "/dev/null"],
    "error": ["err-%j.txt", "my err.txt"],
    "open-mode": ["append", "truncate"],
    "requeue": [None],
    "no-requeue": [None],
    "signal": ["USR1@60", "B:TERM@30", "R:USR2@300"],
    "export": ["ALL", "NONE", "A=b"],
    "spread-job": [None],
    "use-min-nodes": [None],
    "threads-per-core": ["1"],
    "dependency": ["singleton"],
    "array": ["0-3", "1,3%1"],
    "distribution": ["cyclic"],
    "kill-on-invalid-dep": ["yes"],
    "acctg-freq": ["30"],
    "tmp": ["1"],
    "chdir": ["sub"],
    "no-kill": [None, "off"],
    "quiet": [None],
    "exclude": ["{node}"],
    "nodelist": ["{node}"],
    "account": ["project", "other"],
    "qos": ["high"],
    "constraint": ["fast", "fast&big", "[fast|big]", "fast*1"],
    "licenses": ["solver", "solver:2,viewer"],
    "reservation": ["course"],
}
SHORT = {
    "nodes": "N", "ntasks": "n", "cpus-per-task": "c", "time": "t", "job-name": "J", "partition": "p",
    "gpus": "G", "oversubscribe": "s", "overcommit": "O", "hold": "H", "begin": "b", "output": "o",
    "error": "e", "array": "a", "dependency": "d", "chdir": "D", "exclude": "x", "no-kill": "k",
    "quiet": "Q", "distribution": "m", "nodelist": "w", "account": "A", "qos": "q", "constraint": "C",
    "licenses": "L",
}  # fmt: skip
#: Abbreviations that are unique in all supported versions.
PREFIXES = {"partition": "part", "comment": "comm", "ntasks-per-node": "ntasks-per-n", "mail-user": "mail-u"}
#: Facts of a job that differ between two submissions, or that hpctrain chooses.
DIFFERENT = re.compile(
    r"((?:Array)?JobId|AllocNode:Sid|SubmitLine|SubmitTime|AccrueTime|Command|WorkDir|LastSchedEval|Scheduler|Priority|Stdin|StdIn|Power)"
)


def escaped(value: str, characters: str) -> str:
    return "".join(f"\\{character}" if character in characters else character for character in value)


def quoted(rng: random.Random, value: str) -> str:
    styles = ['"' + escaped(value, '"\\') + '"', "'" + escaped(value, "'\\") + "'"]
    if re.fullmatch(r"[\w.,:%+@=/-]+", value, re.ASCII):
        styles += [value, f"{value[0]}'{value[1:]}'" if value[1:] else value]
    elif " " not in value:
        styles.append(escaped(value, "\"'#\\"))
    return rng.choice(styles)


def written(rng: random.Random, name: str, value: str | None) -> str:
    """Return one of the notations of an option."""
    long_name = PREFIXES.get(name, name) if rng.random() < 0.3 else name
    letter = SHORT.get(name) if rng.random() < 0.5 else None
    if value is None:
        return f"-{letter}" if letter else f"--{long_name}"
    text, is_optional = quoted(rng, value), None in VALUES[name]
    if letter:
        return f"-{letter}{'' if is_optional or rng.random() < 0.5 else ' '}{text}"
    return f"--{long_name}{'=' if is_optional or rng.random() < 0.7 else ' '}{text}"


def header(rng: random.Random, node: str) -> str:
    """Return the first lines of a batch script, with comments and blank lines between the options."""
    lines = [rng.choice(["#!/bin/bash", "#!/bin/sh", "#!/usr/bin/env bash", "#!/bin/bash -l"])]
    names = rng.choices(list(VALUES), k=rng.randint(0, 9))
    options = [
        written(rng, name, value and value.format(node=node))
        for name in names
        for value in [rng.choice(VALUES[name])]
    ]
    while options:
        count = rng.randint(1, 3)
        comment = rng.choice(["", "", "  # a comment --nodes=9", "\t#"])
        lines.append(
            rng.choice(["#SBATCH ", "#SBATCH\t", "#SBATCH   "]) + " ".join(options[:count]) + comment
        )
        del options[:count]
        if rng.random() < 0.3:
            lines.append(
                rng.choice(["", "# more", " #SBATCH --nodes=7", "##SBATCH --nodes=7", "#sbatch -N7", "  "])
            )
    return "\n".join([*lines, "", "sleep 1", "#SBATCH --nodes=8", ""])


def request(script: Path, environ: dict[str, str]) -> str | dict[str, str]:
    """Submit a script, and return the facts of its job, or the word `refused`."""
    submitted = run_command(
        ["sbatch", "--hold", "--parsable", script], environ, check=False, cwd=script.parent
    )
    if submitted.returncode != 0:
        return "refused"
    job = submitted.stdout.strip()
    try:
        shown = run_command(["scontrol", "--oneliner", "show", "job", job], environ).stdout.splitlines()[0]
    finally:
        run_command(["scancel", job], environ)
    # Free text contains blanks and equals signs.
    fields = dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", shown))
    for name in {"StdOut", "StdErr"} & fields.keys():
        # The folder of the test may contain the number of the job.
        path = fields[name].removeprefix(str(script.parent))
        fields[name] = re.sub(rf"(?<!\d){job}(?!\d)", "ID", path)
    return {name: value for name, value in fields.items() if not DIFFERENT.fullmatch(name)}


def ours(path: Path, environ: dict[str, str]) -> str | dict[str, str]:
    """Return the facts of the job from hpctrain's script for the same request."""
    try:
        batch = BatchScript.read(path)
        assert batch is not None
        values = resolve_options({}, header=batch.options, cwd=path.parent, environ={})
        shape = {"backend": "slurm", "cwd": path.parent, "python": "/usr/bin/python3"}
        spec, origins = build_batch_spec(path, [], values.options, values.values, **shape)
    except SpecError:
        return "refused"
    script = path.with_suffix(".ours")
    script.write_text(render(spec, origins))
    return request(script, environ)


@pytest.fixture
def site(slurm) -> Iterator[dict[str, str]]:
    """Give the nodes features, and reserve them in the future; return the variables of commands."""
    environ = environment({**slurm.env, "HPCTRAIN_SITE_CONFIG": ""})
    nodes = ",".join(slurm.nodes)
    features, period = ("AvailableFeatures", "ActiveFeatures"), ("StartTime=2099-01-01", "Duration=7-0")
    reservation = ["ReservationName=course", "Users=root", f"Nodes={nodes}", *period]
    changes = ["update", f"NodeName={nodes}"]
    run_command(["scontrol", *changes, *(f"{name}=fast,big" for name in features)], environ)
    run_command(["scontrol", "create", "reservation", *reservation], environ)
    yield environ
    run_command(["scontrol", "delete", "ReservationName=course"], environ)
    run_command(["scontrol", *changes, *(f"{name}=" for name in features)], environ)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(200), marks=pytest.mark.extended, id="200"),
        pytest.param(range(200, 2000), marks=pytest.mark.long, id="1800"),
    ],
)
def test_request_of_a_header_is_that_of_sbatch(slurm, site, tmp_path, seeds):
    node = slurm.nodes[-1]
    (tmp_path / "sub").mkdir()

    def compare(seed: int) -> tuple[str, object, object]:
        text = header(random.Random(seed), node)
        path = tmp_path / f"h{seed}.sbatch"
        path.write_text(text)
        return text, request(path, site), ours(path, site)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compare, seeds))
    for text, expected, actual in results:
        assert actual == expected, text
    # Few headers of the generator are invalid.
    assert sum(expected != "refused" for _, expected, _ in results) > len(seeds) / 2


@pytest.mark.parametrize(
    ("lines", "directives"),
    [
        ("#SBATCH --nodes\n#SBATCH 2 -HO", ["nodes=2", "hold=", "overcommit="]),
        ("#SBATCH -n4 --ntasks=3", ["ntasks=4", "ntasks=3"]),
        ("#SBATCH--qos=a\n#SBATCH -J 'a'\"b\" '' --qos=b", ["qos=a", "job-name=ab"]),
        ("#SBATCH --comment=a\\ b --comment=it\\'s\\", ["comment=a b", "comment=it's"]),
        ("#SBATCH -koff --exclusive -k", ["no-kill=off", "exclusive=", "no-kill="]),
        ("#SBATCH --container-image foo --plugin -N1", ["container-image=foo", "plugin=", "nodes=1"]),
        ("#SLURM --tasks-per-node=2 --", ["ntasks-per-node=2"]),
        ("#PBS -l nodes=2\n#SBATCH --ignore-pbs", ["ignore-pbs="]),
        ("echo\n#SBATCH -N1", []),
    ],
)
def test_words_of_a_header(lines, directives):
    parsed = parse_batch_header(f"#!/bin/sh\n{lines}\n", "job.sbatch").directives
    assert [f"{name}={value}" for name, value, _ in parsed] == directives


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("#SBATCH foo", "Line 2 of job.sbatch has 'foo', which is not an option"),
        ("\n#SBATCH --nodes", "Line 3 of job.sbatch has --nodes without its value"),
        ("#SBATCH --tim=3", "--tim, which may be --time or --time-min"),
        ("#SBATCH --hold=1", "--hold has no value"),
        ("#SBATCH -Z", "has -Z, which is not"),
        ("#SBATCH -- -N1", "has '--'"),
        ('#SBATCH -J "a', 'has an unmatched "'),
        ("#SBATCH -N1 : -N2", "heterogeneous job"),
        ("#SBATCH hetjob", "heterogeneous job"),
        ("#PBS -l nodes=2", "another scheduler"),
    ],
)
def test_header_that_sbatch_refuses(lines, reason):
    with pytest.raises(SpecError, match=reason):
        parse_batch_header(f"#!/bin/sh\n{lines}\n", "job.sbatch")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("#!/bin/bash -l", ["/bin/bash", "-l"]),
        ("#! /usr/bin/env -S zsh -e", ["/usr/bin/env", "-S zsh -e"]),
        ("#!/usr/bin/env bash", ["/usr/bin/env", "bash"]),
        ("#!/usr/bin/python3", []),
        ("import torch", []),
    ],
)
def test_interpreter_of_a_script(line, command):
    assert shell_of(f"{line}\n") == command


def test_notes_name_ignored_directives_and_processes_that_are_not_observed(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(
        "#!/bin/bash\n# SBATCH -N1\n##SBATCH -N1\nsrun --export=NONE a\n# srun --export=NONE b\n"
        "srun -n1 --export NONE c\n#SBATCH -N2\n"
        "export PYTHONPATH=src\nPYTHONPATH=src:$PYTHONPATH\nPYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}src\n"
        "unset A PYTHONPATH\nPYTHONPATH= srun d\nexport PYTHONPATH+=:src\n# unset PYTHONPATH\n"
        'export MY_PYTHONPATH=src PYTHONPATH="$PWD/a b:$PYTHONPATH"\nenv -u PYTHONPATH srun e\n'
    )
    ignored, hidden, replaced = BatchScript.read(path).notes
    assert "options that sbatch ignores: line 2, 7." in ignored
    assert "with --export=NONE, which hpctrain cannot observe: line 4, 6." in hidden
    assert "so hpctrain cannot observe its processes: line 8, 11, 12, 16." in replaced


def test_options_override_the_header(tmp_path):
    """Stronger sources are the last: sbatch uses the last of options that exclude each other."""
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH -N2 -t 10 --mem=1G\n#SBATCH --exclusive --qos=low -o out/%j\n")
    batch = BatchScript.read(path)
    (tmp_path / "hpctrain.yaml").write_text("nodes: 7\naccount: project\n")
    settings = resolve_options(
        {"nodes": 3, "mem_per_cpu": "1M", "ntasks": "8"},
        assignments=["sbatch.oversubscribe=", "time="],
        header=batch.options,
        cwd=tmp_path,
        environ={"SBATCH_QOS": "high", "HPCTRAIN_SITE_CONFIG": "", "HOME": os.fspath(tmp_path)},
    )
    shape = {"backend": "slurm", "cwd": tmp_path, "python": "/usr/bin/python3"}
    spec, origins = build_batch_spec(path, [], settings.options, settings.values, **shape)
    assert list(spec.directives.items()) == [
        ("account", "project"),
        ("exclusive", ""),
        ("output", f"{tmp_path}/out/%j"),
        ("qos", "high"),
        ("nodes", "3"),
        ("mem-per-cpu", "1M"),
        ("ntasks", "8"),
        ("oversubscribe", ""),
    ]
    assert (origins["output"], origins["qos"]) == ("job.sbatch:3", "SBATCH_QOS")
    assert (spec.nodes, spec.name, spec.workdir) == (3, "job.sbatch", str(tmp_path))
    script = render(spec, origins)
    assert "#SBATCH --exclusive  # job.sbatch:3\n" in script
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    added = [line.split("  # ")[0] for line in lines if line.endswith("  # hpctrain")]
    assert added == [
        "#SBATCH --job-name=job.sbatch",
        f"#SBATCH --chdir={spec.run_dir}",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR2@{spec.stop_before_limit_s}",
    ]
    assert all("  # " in line for line in lines)


def test_defaults_of_a_batch_script_give_way_to_its_header(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --no-requeue --open-mode=truncate --signal=B:TERM@30 -D sub\n")
    batch = BatchScript.read(path)
    settings = resolve_options({}, header=batch.options, cwd=tmp_path, environ={"HPCTRAIN_SITE_CONFIG": ""})
    shape = {"backend": "slurm", "cwd": tmp_path, "python": "/usr/bin/python3"}
    spec, _ = build_batch_spec(path, [], settings.options, settings.values, **shape)
    assert job_directives(spec) == {
        "job-name": "job.sbatch",
        "chdir": spec.run_dir,
        "output": f"{tmp_path}/sub/slurm-%j.out",
        "no-requeue": "",
        "open-mode": "truncate",
        "signal": "B:TERM@30",
    }
    assert (spec.workdir, spec.stop_before_limit_s) == (f"{tmp_path}/sub", 30)


@pytest.mark.parametrize("option", ["--signal=B:INT@30", "--input=x", "--test-only", "--clusters=a"])
def test_options_that_cannot_be_adopted_are_refused(tmp_path, option):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH {option}\n")
    script = BatchScript.read(path)
    assert script is not None
    with pytest.raises(SpecError, match=f"Line 2 of job.sh has {option}, which hpctrain cannot adopt"):
        _ = script.options
    path.write_bytes(b"#!/bin/bash\r\nsrun true\r\n")
    with pytest.raises(SpecError, match="DOS line breaks"):
        BatchScript.read(path)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (
            "{0}/logs/%x-%j.out",
            "'{0}/logs' of --output does not exist.* Create it: mkdir -p {0}/logs",
        ),
        ("{0}/a%%b/%j", "The folder '{0}/a%b' of --output does not exist"),
        ("{0}/%x/%j", None),
        ("{0}/job-%j.out", None),
    ],
)
def test_missing_output_folder_is_refused(make_spec, tmp_path, output, problem):
    """Slurm ends such a job with exit code 0:53, and without output."""
    directives = {"output": output.format(tmp_path), "error": f"{tmp_path}-absent/%j"}
    spec = make_spec(program="batch", workdir=str(tmp_path), directives=directives)
    if problem is None:
        (note,) = _check_output_folders(spec)
        assert note.startswith(
            f"Warning: on this machine, the folder '{tmp_path}-absent' of --error does not"
        )
    else:
        with pytest.raises(SpecError, match=problem.format(tmp_path)):
            list(_check_output_folders(spec))
