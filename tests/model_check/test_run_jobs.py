"""All states of the jobs of a run: at most one job trains, and the run continues unless its jobs are lost."""

import time
from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest

from hpctrain.supervisor.policy.job_intent import OwnershipDecision, OwnershipState, decide_ownership
from model_check import run_jobs_model as model
from model_check.run_jobs_model import FIRST, Step, World, first_worlds, next_steps

SUCCESSORS = (FIRST, "18", "19")


class Violation(AssertionError):
    """A state that must not occur, with the steps to it."""


def check_all_states(ids: tuple[str, ...]) -> int:
    """Visit every state of these jobs, first those without a lost job; return their number.

    Raises:
        Violation: with a sequence of steps.
    """
    begun, worlds, numbers, parents = time.monotonic(), [], {}, array("l")
    sources, targets = array("l"), array("l")
    losses: list[tuple[World, int]] = []

    def visit(world: World, parent: int) -> int:
        number = numbers.setdefault(world, len(worlds))
        if number == len(worlds):
            worlds.append(world)
            parents.append(parent)
        return number

    def fail(problem: str, number: int, *more: str) -> None:
        steps = list(more)
        while (parent := parents[number]) >= 0:
            found = [step for step in next_steps(worlds[parent]) if step.world == worlds[number]]
            steps.insert(0, min(found, key=lambda step: step.loses_job).what)
            number = parent
        raise Violation("\n  ".join([f"{problem}:", *steps]))

    def visit_all(number: int) -> None:
        nonlocal num_steps
        while number < len(worlds):
            for step in next_steps(worlds[number]):
                num_steps += 1
                if problem := find_violation(worlds[number], step):
                    fail(problem, number, step.what)
                if step.loses_job:
                    losses.append((step.world, number))
                else:
                    targets.append(visit(step.world, number))
                    sources.append(number)
            number += 1

    num_steps = 0
    for world in first_worlds(ids):
        visit(world, -1)
    visit_all(0)
    complete = [number for number, world in enumerate(worlds) if world.finished]
    if stuck := set(range(len(worlds))) - reach(complete, targets, sources):
        fail("the run cannot complete, although no job was lost", min(stuck))
    while losses:
        number, found = len(worlds), losses
        losses = []
        for world, parent in found:
            visit(world, parent)
        visit_all(number)
    print(f"{len(worlds)} states and {num_steps} steps of {ids} in {time.monotonic() - begun:.0f} s")
    return len(worlds)


def find_violation(before: World, step: Step) -> str | None:
    """Return the property that a step violates, if any."""
    if step.what.endswith("again"):
        return "a deleted lease is created again"
    training = step.world.training()
    if len(training) > 1:
        return "two jobs train"
    for job in training:
        if job.predecessor and step.world.claim != job.id:
            return "a successor trains without the claim"
        if job in before.training() or before.had_suspension:
            continue
        if before.finished:
            return "a job trains after the end of the run"
        if before.failed:
            return "a job trains after the failure of the run"
    if before.ended and step.world.events[-1][0] == "handover" and not before.had_suspension:
        return "a finished run is continued"
    return None


def reach(begin: Iterable[int], sources: array, targets: array) -> set[int]:
    """Return the states that can be reached over these steps."""
    following: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        following.setdefault(source, []).append(target)
    found, waiting = set(begin), list(begin)
    while waiting:
        for target in following.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


@pytest.fixture
def few_faults(monkeypatch):
    monkeypatch.setattr(model, "MAX_DEATHS", 0)


@pytest.fixture
def old_listings(monkeypatch):
    monkeypatch.setattr(model, "MAX_HIDDEN", 3)


@pytest.mark.slow
def test_two_jobs(old_listings):
    assert check_all_states((FIRST, "18")) > 5000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_jobs():
    assert check_all_states(SUCCESSORS) > 50_000


def test_planted_start_without_the_claim(few_faults, monkeypatch):
    monkeypatch.setattr(
        model, "decide_ownership", lambda state: decide_ownership(replace(state, claimed_by=state.job_id))
    )
    with pytest.raises(Violation, match="without the claim"):
        check_all_states(SUCCESSORS)


def test_planted_exit_of_a_requeued_successor(few_faults, monkeypatch):
    def decide(state: OwnershipState) -> OwnershipDecision:
        is_requeued = state.predecessor is not None and state.newest == state.job_id
        return OwnershipDecision.SUPERSEDED if is_requeued else decide_ownership(state)

    monkeypatch.setattr(model, "decide_ownership", decide)
    with pytest.raises(Violation, match="cannot complete"):
        check_all_states((FIRST, "18"))


def test_planted_early_deletion_of_leases(old_listings, monkeypatch):
    """An old listing lacks the newest lease; the number after its last lease must not be free again."""
    monkeypatch.setattr(model, "KEPT_LEASES", 2)
    with pytest.raises(Violation, match="created again"):
        check_all_states((FIRST, "18"))
