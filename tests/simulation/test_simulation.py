"""The supervisor in virtual time: invariants, exact replay, shrinking, and planted bugs."""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import yaml

from simulation.config import Fault, ForeignProgram
from simulation.mutations import MUTATIONS, PLANTED_SEEDS
from simulation.simulate import SeedResult, command_of, run_seed, shrink, simulated_supervisor

# A killed process does not close its files.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: Seeds in which each planted bug must be found.
_MUTATION_SEEDS = 10_000


@pytest.fixture(autouse=True)
def _simulated():
    with simulated_supervisor():
        yield


def first_failure(seeds: range) -> SeedResult | None:
    return next((result for seed in seeds if (result := run_seed(seed)).violation is not None), None)


def test_the_same_seed_replays_the_same_events():
    first, second = ([run_seed(seed) for seed in range(15)] for _ in range(2))
    assert [one.trace_hash for one in first] == [one.trace_hash for one in second]
    assert len({one.trace_hash for one in first}) == len(first)


#: Bugs that the simulation found, and the seed and the faults that showed each one.
FOUND_BUGS = yaml.safe_load(Path(__file__).with_name("found_bugs.yaml").read_text())


@pytest.mark.parametrize("found", FOUND_BUGS, ids=lambda found: found["bug"])
def test_found_bug_is_fixed(found):
    result = run_seed(found["seed"], [Fault.parse(text) for text in found["faults"].split()])
    assert result.violation is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds",
    [
        range(250),
        pytest.param(range(250, 2_000), marks=pytest.mark.extended),
        pytest.param(range(1_000_000, 1_020_000), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_no_seed_violates_an_invariant(seeds):
    failure = first_failure(seeds)
    assert failure is None, command_of(shrink(failure))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        # The bits of a number are independent.
        pytest.param(number, marks=[pytest.mark.extended] * (number % 7 > 0))
        for number in range(ForeignProgram.COUNT)
    ],
)
def test_foreign_program_that_always_fails_ends(number):
    result = run_seed(number % 5, [Fault("start-over", 0.0, number)])
    assert result.violation is None, command_of(result)
    loads = ForeignProgram(number).loads_files
    # Slurm ends a job whose ranks hang at its time limit.
    assert result.outcome in ("FAILED", "none (TIMEOUT)", *["COMPLETED"] * loads)


def plant(stack: ExitStack, bug: str) -> None:
    for target, name, replacement in MUTATIONS[bug]:
        stack.enter_context(mock.patch.object(target, name, replacement))


def test_a_failure_is_shrunk_to_the_faults_that_cause_it():
    with ExitStack() as stack:
        plant(stack, "delete the newest checkpoint")
        faults = [Fault("kill", 40.0, 1.0), Fault("slurm-away", 3.0, 10.0)]
        found = shrink(run_seed(0, faults))
    assert "a checkpoint to keep was deleted" in str(found.violation)
    assert found.faults == ()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", MUTATIONS)
def test_planted_bug_is_found(bug):
    with ExitStack() as stack:
        plant(stack, bug)
        assert first_failure(range(_MUTATION_SEEDS)) is not None


@pytest.mark.parametrize("bug", PLANTED_SEEDS)
def test_planted_bug_is_found_by_its_seed(bug):
    seed, words = PLANTED_SEEDS[bug]
    faults = [Fault.parse(text) for text in words.split()]
    with ExitStack() as stack:
        plant(stack, bug)
        found = run_seed(seed, faults)
    if found.violation is None and sys.version_info >= (3, 12):
        pytest.skip("this seed finds the bug with Python 3.11")
    assert found.violation is not None
    assert run_seed(seed, faults).violation is None
