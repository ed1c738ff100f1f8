# Everything here works on a fresh machine; what is missing is installed into .venv first.
#   make PYTHON=python3.12 …   takes another Python than python3 for it
#   make TEST_PROCESSES=8 test  runs more tests at once, on more than two cores; FAST_PROCESSES for test-fast

PYTHON ?= python3
export PYTHON
# More than two cores have: most tests on Slurm and most end-to-end tests wait.
TEST_PROCESSES ?= 5
# The fast tests wait for nothing, and each process spends seconds on finding all tests.
FAST_PROCESSES ?= 3
# mkdocs-material announces a successor at every build.
export NO_MKDOCS_2_WARNING := 1
# Tests start hundreds of Python processes, which are faster with compiled modules.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin

.PHONY: help demo test-fast test test-long test-slurm-versions test-torch-versions bench conformance simulate check format \
    docs clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Files inside .venv: gone with it, and older than these two files once they change.
.venv/installed: pyproject.toml constraints.txt
	@scripts/make_venv.sh examples,dev
	@touch .venv/demo $@

.venv/demo: pyproject.toml constraints.txt
	@scripts/make_venv.sh examples
	@touch $@

# Where a Slurm answers, submit would take it; the demo is the one without.
demo: .venv/demo  ## train on handwritten digits: two pretend nodes, four ranks, no Slurm
	$(BIN)/hpctrain submit $(if $(shell sbatch --version 2>/dev/null),--backend local) \
	    --nodes 2 --gpus-per-node 2 --follow examples/digits.py

test-fast: .venv/installed  ## the tests that start no Slurm and no ranks: a minute
	$(BIN)/pytest -q -n $(FAST_PROCESSES) --dist worksteal -m "not (slurm or ranks or slow or gpu or long)" \
	    --ignore=tests/e2e --ignore=tests/examples --ignore=tests/plugins \
	    --ignore=tests/training/test_lightning_module.py # because the import of Lightning takes seconds

test: .venv/installed  ## the tests that take seconds, on a real Slurm that they start: eight minutes on two cores
	@scripts/install_for_tests.sh
	$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=15
	@scripts/say_not_tested.sh $(BIN)/python

test-long: .venv/installed  ## the extended tests, those that take minutes, and further variants
	@scripts/install_for_tests.sh
	$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile -m "long or extended" --durations=15
	@$(MAKE) --no-print-directory test-slurm-versions SLURM_VERSIONS="24.11 26.05"
	@$(MAKE) --no-print-directory test-torch-versions

# The versions are downloaded, not installed. The tests share one cluster, so they run one after another.
SLURM_VERSIONS ?= installed 24.11 26.05
SLURM_TESTS ?= tests/jobs/*live.py tests/cluster/test_live_launches.py \
    tests/cluster/test_hostlist.py tests/sandbox/test_sandbox_live.py tests/e2e/test_slurm.py \
    tests/e2e/test_faults_on_slurm.py tests/e2e/test_executor.py tests/e2e/test_requeue_rules.py \
    tests/e2e/test_successors.py tests/e2e/test_elastic.py tests/e2e/test_unprivileged_users.py \
    tests/jobs/test_batch_header.py tests/e2e/test_adopted_scripts.py \
    --deselect tests/e2e/test_adopted_scripts.py::test_rarer_adopted_script

test-slurm-versions: .venv/installed  ## tests on Slurm with each version: 40 minutes per version
	@scripts/install_for_tests.sh
	@failed=; for version in $(SLURM_VERSIONS); do \
	    echo "Slurm $$version"; \
	    $(BIN)/pytest -q --long -m slurm --slurm-version $$version $(SLURM_TESTS) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "Tests failed with Slurm$$failed" >&2; exit 1; }

# An environment takes up to 6 GB. All other packages are those of .venv.
TORCH_VERSIONS ?= 2.6.0 2.8.0 2.13.0 newest
TORCH_TESTS ?= tests/checkpoint tests/runtime tests/training tests/plugins tests/test_torch_compat.py \
    tests/e2e/test_programs.py tests/e2e/test_compiled_restart.py

test-torch-versions: .venv/installed  ## tests of the ranks with each version of torch
	@failed=; for version in $(TORCH_VERSIONS); do \
	    echo "torch $$version"; \
	    python=$$(scripts/make_torch_venv.sh $$version) && \
	        CI=true $$python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile -m "not slurm and not long" $(TORCH_TESTS) || \
	        failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "Tests failed with torch$$failed" >&2; exit 1; }

bench: .venv/installed  ## all benchmarks, into docs/benchmarks.md: 25 minutes on two idle cores
	@scripts/install_for_tests.sh
	$(BIN)/python benchmarks/run_all.py

conformance: .venv/installed  ## test suites of other projects, into docs/conformance.md: CONFORMANCE_SOURCES=DIR
	@scripts/install_for_tests.sh
	$(BIN)/python conformance/run_all.py

# Set iteration depends on the hash seed, and a seed must replay exactly.
SEEDS ?= 0:10000
simulate: .venv/installed  ## the supervisor in virtual time: SEEDS=0:10000, TIME=60 (seconds)
	@PYTHONHASHSEED=0 PYTHONPATH=tests $(BIN)/python -m simulation.simulate --seeds $(SEEDS) $(if $(TIME),--time $(TIME)) $(FAULTS)

check: .venv/installed  ## format, lint, types, layers, conventions, documentation
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_conventions.py
	$(BIN)/mkdocs build --strict # not --quiet: that drops the warnings before --strict counts them

format: .venv/installed  ## let ruff put the code into form
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

docs: .venv/installed  ## the documentation, into site/
	$(BIN)/python scripts/write_options.py
	$(BIN)/mkdocs build --strict
	@echo "The documentation lies in site/index.html"

clean:  ## remove what make made (runs/ stays)
	rm -rf .venv site dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
