"""Explain refusals of `sbatch`, with a remedy from the facts about the site."""

from __future__ import annotations

from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.jobs.site.site_check import candidate_partitions, suggest_partitions
from hpctrain.slurm.pending_reasons import suggest_remedy
from hpctrain.slurm.site_facts import Site
from hpctrain.text import suggest

_SIZE = "The job requests {request}. {offers} Request less, or choose another --partition."
_CLOSED = "Choose another --partition, or wait."
_NO_ACCESS = (
    "The partition may be limited to some users, or require a --reservation. {offers} Choose another "
    "--partition."
)
_ACCOUNTS = "`sacctmgr show assoc user=$USER` lists yours"

#: Remedies by a part of Slurm's message (slurm_errno.c).
REMEDIES = {
    "Invalid partition name": "{partition_hint}",
    "No partition specified": "Use --partition. {partition_hint}",
    "Required partition not available": _CLOSED,
    "not permitted to use this partition": _NO_ACCESS,
    "Access/permission denied": _NO_ACCESS,
    "node configuration is not available": _SIZE,
    "Node count specification invalid": _SIZE,
    "More processors requested": _SIZE,
    "Memory required by task": _SIZE,
    "generic resource (gres) specification": _SIZE,
    "Invalid feature specification": "Choose from the features of the nodes (--constraint): {features}.",
    "Invalid node name": "Correct --nodelist or --exclude: {offers}",
    "nodes not in this partition": "Correct --nodelist, or choose another --partition. {offers}",
    "Requested time limit is invalid": "{offers} Use a --time within the limit.",
    "Invalid job array": "The highest task number at this site is {last_task} (MaxArraySize). Use smaller "
    "numbers, or submit several arrays.",
    "Invalid account": f"Use another --account or --partition; {_ACCOUNTS}.",
    "Invalid qos": f"Use another --qos; {_ACCOUNTS[:-7]} format=qos` lists yours.",
    "reservation": "Use another --reservation; `scontrol show reservation` lists them.",
}


def explain_refusal(refusal: str, request: JobRequest, site: Site) -> str:
    """Return Slurm's message, and sentences on the remedy."""
    remedy = next((remedy for text, remedy in REMEDIES.items() if text in refusal), None)
    if remedy is None:
        return f"{refusal}. {suggest_remedy(refusal)}"
    candidates = candidate_partitions(request, site)
    features = {feature for part in candidates for group in part.groups for feature in group.features}
    names = [partition.name for partition in site.partitions if not partition.hidden]
    unknown = next((name for name in request.partitions if site.partition(name) is None), "")
    facts = {
        "request": request.describe(),
        "offers": " ".join(
            f"Partition {partition.name} has {partition.describe_nodes()}; {partition.describe_limits()}."
            for partition in candidates
        ),
        "partition_hint": f"Unknown partition {unknown!r} ({request.origin('partition')}). "
        f"{suggest(unknown, names)}",
        "features": ", ".join(sorted(features)) or "there are none, so remove the option",
        "last_task": site.slurm.max_array_size - 1 if site.slurm else "lower",
    }
    others = suggest_partitions(request, candidates, site) if "{offers}" in remedy else []
    return " ".join([f"{refusal}.", " ".join(remedy.format(**facts).split()), *others])
