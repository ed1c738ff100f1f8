"""Run all benchmarks and write docs/benchmarks.json and docs/benchmarks.md from their results.

    python benchmarks/run_all.py [NAME ...] [--page]

NAME selects benchmarks, whose results replace their earlier ones. --page only writes the page. All benchmarks
take less than 25 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from results import Result, format_figure

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
#: Time limit of a benchmark, in seconds.
LIMIT_S = 600
#: Packages whose versions influence the results.
PACKAGES = ("torch", "lightning", "accelerate", "submitit")


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    name: str
    """The benchmark, a script in this folder."""
    options: str = ""
    """Options that make it short enough for `make bench`."""
    needs_gpu: bool = False


SECTIONS = (
    Section("Restart", "restart", "--rounds 2"),
    Section("Compiled code", "compiled_restart", "--rounds 2"),
    Section("Copies in memory", "memory_copies", "--rounds 4 --kills 6"),
    Section("GPU", "gpu", needs_gpu=True),
    Section("Preemption", "preemption", "--rounds 1 --slurm installed 24.11 26.05"),
    Section("Start-up from local disks", "stage", "--rounds 1"),
    Section("Training step", "step_overhead", "--rounds 5"),
    Section("Elastic determinism", "elastic_determinism", "--rounds 3 --steps 8"),
    Section("Checkpoints", "checkpoint", "--rounds 2"),
    Section("Submission", "submit"),
    Section("Command line", "cli_startup"),
    Section("Order of the data", "data_order"),
    Section("Fetching data", "data_fetch", "--rounds 3"),
    Section("Buckets", "buckets", "--rounds 3 --steps 8"),
    Section("Node lists", "hostlist"),
    Section("Ranks", "detect"),
    Section("Listing 1,000 runs", "status"),
    Section("Calls to Slurm", "slurm_rpcs", "--seconds 30"),
    Section("Report of a large run", "report", "--rounds 2"),
    Section("Measuring and logging", "telemetry", "--pairs 2"),
    Section("Measuring a node", "sampler", "--seconds 20"),
    Section("Heartbeat", "heartbeat"),
    Section("Rendezvous of 4,000 hosts", "rendezvous"),
    Section("Step hook", "step_hook"),
    Section("Supervisor", "supervisor_cpu", "--seconds 20"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    known = [section.name for section in SECTIONS]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"There is no benchmark {unknown[0]!r}. Choose from: {', '.join(known)}.")
    path, page = DOCS / "benchmarks.json", DOCS / "benchmarks.md"
    record = json.loads(path.read_text()) if path.exists() else {}
    failed = []
    for section in () if options.page else SECTIONS:
        if options.names and section.name not in options.names:
            continue
        if section.needs_gpu and not torch.cuda.is_available():
            print(f"\n{section.title}: not measured, because this machine has no GPU")
            continue
        found = run(section)
        if found is None:
            failed.append(section.name)
            continue
        before = {
            result["name"]: result["value"] for result in record.get(section.name, {}).get("results", [])
        }
        record[section.name] = {**found, "before": before}
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    page.write_text(write_page(record))
    print(f"\nWrote {page}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(section: Section) -> dict[str, Any] | None:
    """Run a benchmark. Returns its results and their circumstances, or None if it failed."""
    begun, load = time.monotonic(), os.getloadavg()[0]
    print(f"\n{section.title} ({section.name}.py {section.options})", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, f"{FOLDER / section.name}.py", *section.options.split()]
        try:
            subprocess.run([*command, "--json", str(results), "--no-limits"], timeout=LIMIT_S, check=True)
        except subprocess.SubprocessError as error:
            print(error, file=sys.stderr)
            return None
        return {
            "options": section.options,
            "results": json.loads(results.read_text()),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - begun),
            "load": round(load, 1),
            "machine": describe_machine(),
        }


def describe_machine() -> str:
    slurm = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, check=False).stdout
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    versions += [slurm.strip().replace("slurm-wlm", "Slurm")] if slurm else []
    if torch.cuda.is_available():
        versions.insert(0, torch.cuda.get_device_name())
    return ", ".join(
        [f"{os.cpu_count()} cores, {platform.machine()}", f"Python {platform.python_version()}", *versions]
    )


def write_page(record: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    sections = [section for section in SECTIONS if section.name in record]
    results = {each.name: [Result(**fields) for fields in record[each.name]["results"]] for each in sections}
    machines = {record[each.name]["machine"] for each in sections if not each.needs_gpu}
    lines = [
        "# Benchmarks",
        "",
        "`make bench` runs all benchmarks and writes this page. Ratios compare measurements made alternately",
        "on the same machine. Figures with a range are medians. Each script describes its method, and",
        "`docs/benchmarks.json` contains all figures, options and dates.",
        "",
        f"Machine: {'; '.join(sorted(machines))}.",
    ]
    for section in sections:
        lines += write_section(section, record[section.name], results[section.name])
    return "\n".join(lines) + "\n"


def write_section(section: Section, found: dict[str, Any], results: list[Result]) -> list[str]:
    doc = ast.get_docstring(ast.parse((FOLDER / f"{section.name}.py").read_text())) or ""
    lines = ["", f"## {section.title}", "", doc.partition("\n\n")[0], ""]
    has_headlines = any(result.headline for result in results)
    for result in results:
        if result.headline or not result.is_met or (result.limit is not None and not has_headlines):
            span = f" ({result.format_range().replace(' to ', '–')})" if result.lowest is not None else ""
            limit = "" if result.is_met else f"; limit: {result.format_limit()}"
            figure = f"{format_figure(result.value)} {result.unit}".strip()
            lines.append(f"- {result.name}: **{figure}**{span}{limit}")
    if section.needs_gpu:
        lines += ["", f"Machine: {found['machine']}."]
    return lines


if __name__ == "__main__":
    main()
