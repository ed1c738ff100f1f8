"""What happened to a run and what it cost, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.words import count, duration, number, share, whole
from hpctrain.telemetry.spans import What

#: What each share of the ledger means, in a few words.
MEANING = {
    What.TRAINING: "steps that count were trained",
    What.COMMUNICATING: "ranks waited for each other's gradients",
    What.DATA: "training waited for the next batch",
    What.VALIDATING: "the validation set was gone through",
    What.SAVING: "a save held up the training",
    What.LOADING: "a checkpoint was read",
    What.STARTING: "ranks were started, up to their first step",
    What.RESTARTING: "ranks had ended, and were to be started again",
    What.LOST: "steps that had to be trained again",
    What.QUEUED: "the run waited for an allocation",
    What.IDLE: "the job ended, or nobody had asked for another",
}
_ENDS = {"failure": "failure", "stop": "stop", "vanished": "lost job", "failed": "failure"}
_FOLLOWED = {
    "restart": "started again in the same allocation",
    "shrink": "started again on fewer nodes",
    "replace": "started again with another node",
    "requeue": "put back into the queue",
    "successor": "continued by another job",
    "submission": "submitted again",
}


def story(facts: Facts) -> list[str]:
    """What a newcomer wants to know first: how far it came, what happened, what that cost."""
    if not facts.ledger.spans:
        return ["Nothing is on record yet."]
    wall = duration(facts.ledger.wall_us / 1e6)
    starts = f"{count(len(facts.attempts), 'start')} of the ranks"
    steps = "No step was logged" if facts.step is None else count(facts.step, "step")
    sentences = [f"{steps} {'so far ' if facts.is_going else ''}in {wall}, with {starts}."]
    if facts.cause:
        sentences.append(f"It failed: {facts.cause.rstrip('.')}.")
    if (since := facts.curves.no_number_since("loss")) is not None:
        sentences.append(f"From step {since} on the loss is no number.")
    if interruptions := facts.interruptions:
        sentences += _what_interruptions_cost(facts, interruptions)
    elif facts.attempts and not facts.is_going:
        sentences.append("Nothing interrupted it.")
    if (ettr := facts.goodput.ettr) is not None and facts.step is not None:
        sentences.append(f"Of the time in which it was wanted, {share(ettr)} trained steps that count.")
    return sentences


def _what_interruptions_cost(facts: Facts, interruptions: Sequence[Attempt]) -> Iterator[str]:
    kinds = Counter(_ENDS[str(attempt.end)] for attempt in interruptions)
    told = ", ".join(count(number_of, kind) for kind, number_of in kinds.items())
    lost_us = facts.ledger.totals_us[What.LOST]
    away_us = sum(attempt.away_us for attempt in interruptions)
    yield (
        f"Interruptions: {told}. They cost {duration((lost_us + away_us) / 1e6)}: {duration(lost_us / 1e6)} "
        f"of work that was lost, with {count(facts.ledger.lost_steps, 'step')} that had to be trained again, "
        f"and {duration(away_us / 1e6)} until the training went on."
    )


def what_followed(attempt: Attempt) -> str:
    """What came after an attempt's end."""
    if attempt.followed_by is None:
        return "the run ended" if attempt.end else "it goes on"
    return _FOLLOWED.get(attempt.followed_by, attempt.followed_by)


def how_it_ended(attempt: Attempt) -> str:
    """The end of an attempt in one sentence or less."""
    if attempt.end is None:
        return "goes on"
    return attempt.cause or attempt.end


def what_it_cost(attempt: Attempt) -> str:
    """What an attempt's end cost; empty where it was the run's."""
    if not attempt.interrupted:
        return ""
    return f"{duration(attempt.lost_us / 1e6)} lost, {duration(attempt.away_us / 1e6)} away"


def figures(facts: Facts) -> list[tuple[str, str, str]]:
    """The figures to see first: name, value, and what it is."""
    lowest = facts.curves.lowest("loss")
    at = f"lowest {number(lowest[1])} at step {lowest[0]:.0f}" if lowest else ""
    loss, since = number(facts.curves.last("loss")), facts.curves.no_number_since("loss")
    if since is not None:
        loss, at = "no number", f"since step {since}; {at or 'it never was one'}"
    shown = [
        ("Steps", whole(facts.step), _rate(facts)),
        ("Loss", loss, at),
        ("Time", duration(facts.ledger.wall_us / 1e6), "from submission to " + _until(facts)),
        ("Starts", str(len(facts.attempts)), count(len(facts.interruptions), "interruption")),
        ("Productive", share(facts.goodput.ettr), "ETTR: of the time in which it was wanted"),
        (
            "Lost work",
            duration(facts.ledger.totals_us[What.LOST] / 1e6),
            f"{count(facts.ledger.lost_steps, 'step')} trained again",
        ),
    ]
    if facts.goodput.mfu is not None:
        shown.append(("MFU", share(facts.goodput.mfu), "model FLOPs utilisation"))
    return shown


def _rate(facts: Facts) -> str:
    return "" if facts.steps_per_s is None else f"{number(facts.steps_per_s)} a second, the median"


def _until(facts: Facts) -> str:
    return "now" if facts.is_going else "the last record"
