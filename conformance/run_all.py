"""Run the test suites of other projects against hpctrain, and write docs/conformance.json and .md.

    python conformance/run_all.py [NAME ...] [--page]

NAME selects suites, whose results replace their earlier ones. --page only writes the page. Downloads are kept
in ~/.cache/hpctrain-conformance. CONFORMANCE_SOURCES is a folder with checkouts of the repositories that the
package index does not have. Two suites run at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml
from adapters.programs import NOT_RUN

from hpctrain import sandbox

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parent / "docs"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hpctrain-conformance")
#: Time limits in seconds: of a suite, and of a test.
SUITE_LIMIT_S, TEST_LIMIT_S = 7200, 300
DISTURBANCES = ("preempted", "killed", "hung")
PACKAGES = ("torch", "lightning", "accelerate")
#: An absolute path, which says nothing on another machine.
_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+){2,}")


class MissingSource(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    suites = yaml.safe_load((FOLDER / "suites.yaml").read_text())
    if unknown := {*options.names} - {suite["name"] for suite in suites}:
        parser.error(f"There is no suite {min(unknown)!r} in suites.yaml.")
    path = DOCS / "conformance.json"
    chosen = [suite for suite in suites if not options.names or suite["name"] in options.names]
    executor = ThreadPoolExecutor(2)
    try:
        runs = {executor.submit(run, suite): suite for suite in chosen if not options.page}
        for future in as_completed(runs):
            try:
                found = future.result()
            except MissingSource as error:
                print(f"\n{runs[future]['title']}: skipped: {error}", flush=True)
                continue
            record = json.loads(path.read_text()) if path.exists() else {}
            record[runs[future]["name"]] = found
            path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    finally:
        executor.shutdown(cancel_futures=True)
    record = json.loads(path.read_text()) if path.exists() else {}
    run_before = [suite for suite in suites if suite["name"] in record]
    (DOCS / "conformance.md").write_text(write_page(run_before, record))
    checked = [suite for suite in run_before if suite in chosen]
    if unexplained := [
        line for suite in checked for line in unexplained_failures(suite, record[suite["name"]])
    ]:
        sys.exit("\n".join(unexplained))


def run(suite: dict[str, Any]) -> dict[str, Any]:
    """Run a suite, and return the outcome of each test."""
    source, version = find_source(suite["source"])
    python = make_environment(suite)
    if name := suite["source"].get("installed"):
        show = f"from importlib.metadata import version; print(version('{name}'))"
        shown = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
        version = shown.stdout.strip()
    paths = [FOLDER / "adapters", FOLDER.parent, *(source / name for name in suite.get("path", ()))]
    tests = [FOLDER / name if name.startswith("adapters/") else source / name for name in suite["tests"]]
    plugins = ["-p", suite["plugin"]] if "plugin" in suite else []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-conformance-") as folder, make_folder(suite):
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={source}", "--tb=short"]
        command += ["-p", "no:cacheprovider", *plugins, f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}"]
        command += [*tests, *suite.get("options", ())]
        variables = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        variables |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        log = Path(folder, "log")
        with log.open("w") as output, suppress(subprocess.TimeoutExpired):  # then there is no report
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            subprocess.run(
                list(map(str, command)), cwd=folder, env=variables, timeout=SUITE_LIMIT_S, **streams
            )
        print(f"\n{suite['title']}\n{log.read_text(errors='replace')}", flush=True)
        outcomes, programs = dict(read_outcomes(report)), read_programs(report)
    return {
        "version": version,
        "outcomes": outcomes,
        **({"programs": programs} if programs else {}),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - begun),
        "machine": describe_machine(),
    }


@contextmanager
def make_folder(suite: dict[str, Any]) -> Iterator[None]:
    """Make the folder that the tests of a suite expect, and remove it afterwards. An existing one stays."""
    folder = Path(suite.get("folder", "/"))
    if folder.exists():
        yield
        return
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder)


def find_source(source: dict[str, str]) -> tuple[Path, str]:
    """Return the folder with the tests, and their version; download it if the package index has it."""
    if name := source.get("installed"):
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise MissingSource(f"{name} is not installed") from None
        return Path(str(package.locate_file("."))).resolve(), package.version
    if name := source.get("sdist"):
        folder = CACHE / "sdists" / name
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
            with tempfile.TemporaryDirectory() as downloads:
                if subprocess.run([*pip, "--dest", downloads, name], check=False).returncode:
                    raise MissingSource(f"pip cannot download {name}")
                (archive,) = Path(downloads).iterdir()
                with tarfile.open(archive) as opened:
                    opened.extractall(folder, filter="data")
        (top,) = folder.iterdir()
        return top, name.partition("==")[2]
    folder = Path(os.environ.get("CONFORMANCE_SOURCES", "/nonexistent"), source["github"].partition("/")[2])
    if not folder.exists():
        raise MissingSource(f"clone github.com/{source['github']} into the folder CONFORMANCE_SOURCES")
    described = ["git", "-C", str(folder), "log", "-1", "--format=%h"]
    return folder, subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


def make_environment(suite: dict[str, Any]) -> Path:
    """Return a Python with our packages and those that the suite needs in addition."""
    if not (needs := suite.get("needs")):
        return Path(sys.executable)
    folder = CACHE / "environments" / suite["name"]
    python = folder / "bin" / "python"
    is_new = not python.exists()
    if is_new:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = folder.glob("lib/*/site-packages")
    (site / "ours.pth").write_text("\n".join(ours))
    if is_new and subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], check=False).returncode:
        shutil.rmtree(folder)
        raise MissingSource(f"pip cannot install {', '.join(needs)}")
    return python


def read_outcomes(report: Path) -> Any:
    """Yield the name and the outcome of each test; a failure has the first line of its message."""
    if not report.exists():
        yield "pytest", "failed: no report"
        return
    for case in ElementTree.parse(report).iter("testcase"):
        if "name" not in case.attrib:  # of an interrupted pytest
            continue
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((item for item in case if item.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            yield name, "passed"
        elif problem.tag == "skipped":
            yield name, "skipped"
        else:
            lines = (problem.get("message") or "no message").splitlines()
            yield name, f"failed: {_PATH.sub('PATH', lines[0])[:200]}"


def read_programs(report: Path) -> dict[str, dict[str, str]]:
    """Return the version of each program, and its result in each scenario."""
    programs: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        if "version" in properties:
            name, _, scenario = case.get("name", "").rpartition("[")[2].removesuffix("]").rpartition("-")
            program = programs.setdefault(name, {"version": properties["version"]})
            if scenario in DISTURBANCES:
                program[scenario] = properties.get("result", "not to the end")
    return programs


def describe_machine() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    slurm = f"Slurm {sandbox.installed_version()}"
    return ", ".join([f"{os.cpu_count()} cores", f"Python {platform.python_version()}", *versions, slurm])


def explain(suite: dict[str, Any], test: str) -> str | None:
    """Return who has to act on a failure, and why."""
    reasons = suite.get("failures", {}).items()
    return next((reason for pattern, reason in reasons if fnmatchcase(test, pattern)), None)


def failed_tests(found: dict[str, Any]) -> dict[str, str]:
    return {test: text for test, text in found["outcomes"].items() if text.startswith("failed")}


def unexplained_failures(suite: dict[str, Any], found: dict[str, Any]) -> list[str]:
    failed = failed_tests(found).items()
    return [f"{suite['name']}: {test}: {text}" for test, text in failed if explain(suite, test) is None]


def write_failures(suite: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the reasons of the failures, with their numbers, by who has to act."""
    groups: dict[str, list[str]] = {}
    reasons = Counter(explain(suite, test) or "ours: unexplained" for test in failed_tests(found))
    for reason, count in reasons.items():
        who, _, why = reason.partition(": ")
        groups.setdefault(who, []).append(f"{why} ({count})" if count > 1 else why)
    return ". ".join(f"{who}: {'; '.join(whys)}" for who, whys in groups.items())


def group_programs(programs: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return the programs that continued in each way, with the disturbances if not after all of them."""
    groups: dict[str, list[str]] = {}
    for name, results in programs.items():
        ways: dict[str, list[str]] = {}
        for disturbance in DISTURBANCES:
            ways.setdefault(results.get(disturbance, "not run"), []).append(disturbance)
        for way, disturbances in ways.items():
            after = f" ({', '.join(disturbances)})" if len(ways) > 1 else ""
            groups.setdefault(way, []).append(f"{name} {results['version']}{after}")
    return groups


def write_page(suites: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machines = sorted({record[suite["name"]]["machine"] for suite in suites})
    dates = sorted({record[suite["name"]]["date"] for suite in suites})
    lines = [
        "# Suites and programs of other projects",
        "",
        "`make conformance` runs these against hpctrain, and writes this page and `conformance.json`.",
        "",
        f"{'; '.join(machines)}; {', '.join(dates)}.",
        "",
        "| suite | tests | passed | failed |",
        "|---|---|---|---|",
    ]
    for suite in suites:
        found = record[suite["name"]]
        counts = Counter(text.partition(":")[0] for text in found["outcomes"].values())
        passed = f"{counts['passed']}, {counts['skipped']} skipped" if counts["skipped"] else counts["passed"]
        cells = [f"{suite['title']} {found['version']}", suite["part"], passed, write_failures(suite, found)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    groups = group_programs(record.get("programs", {}).get("programs", {}))
    lines += ["", "A disturbed program continued:", ""]
    lines += [f"- {how}: {', '.join(names)}" for how, names in groups.items()]
    lines += [f"- not run: {names}, which {reason}" for reason, names in NOT_RUN.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
