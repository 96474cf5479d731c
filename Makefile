# Everything a fresh machine needs is set up on the way: `make run` or `make test` is the first command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL_PINNED := $(PIP_INSTALL) -c constraints.txt

# Tests start hundreds of processes; without cached bytecode each of them would compile the whole package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-rest test-rest-ray test-rest-others test-all test-frameworks test-gpu coverage browser bench lint format clean
.DELETE_ON_ERROR:

help:  ## show these lines
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

run: $(READY)  ## train examples/digits.py with two workers and show the Result
	$(BIN)/python examples/digits.py --name "digits-$$(date +%Y%m%d-%H%M%S)"

# Which test is in which tier: tests/support/tiers.py. All tests on Ray are one worker's, the others' the rest.
TEST_WORKERS ?= $(shell echo $$(( $$(nproc) > 2 ? $$(nproc) : 2 )))
# `make coverage` runs pytest under coverage.
ONE_PROCESS := $(BIN)/python $(COVERAGE) -m pytest --durations 20
PARALLEL := $(ONE_PROCESS) --dist loadfile --max-worker-restart 20 --numprocesses

test: $(READY)  ## run the fast tests, and one whole run for each promise
	$(PARALLEL) $(TEST_WORKERS) -m "smoke or not (e2e or ray or slow or gpu)" $(ARGS)

# One after the other: side by side they take as long on two cores, and stories then wait three times as long for each step.
test-rest: $(READY)  ## run the tests that `make test` leaves out
	@$(MAKE) --no-print-directory --keep-going test-rest-ray test-rest-others

# Ray's core ended workers of pytest-xdist in the middle of its own tests, so those run in a process of their own.
test-rest-ray: $(READY)
	$(ONE_PROCESS) -m "not smoke and ray and not gpu" $(ARGS)

# Whole runs wait about as long as they compute, so two workers share two cores well.
test-rest-others: $(READY)
	$(PARALLEL) 2 -m "not smoke and (gpu or (e2e or slow) and not ray)" $(ARGS)

test-all: test test-rest  ## run all tests

# JAX and TensorFlow take 1.9 GB and seconds to import, so they are beside the environment of the other tests, not in it.
test-frameworks: $(FRAMEWORKS_READY)  ## run the tests of XGBoost, LightGBM, JAX and TensorFlow, and install the latter two
	$(FRAMEWORKS)/bin/python -m pytest --durations 20 -m "not ray and not gpu" tests/frameworks tests/test_docs_frameworks.py \
		tests/stories/test_xgboost.py tests/stories/test_lightgbm.py tests/stories/test_boosted_trees.py tests/stories/test_jax.py tests/stories/test_tensorflow.py \
		tests/stories/test_framework_failures.py $(ARGS)

# In every process that the tests start; those that are ended by SIGKILL leave no figures.
coverage: $(READY)  ## run all tests, and show which lines of src they reach
	rm -rf build/coverage && mkdir -p build/coverage
	@$(MAKE) --no-print-directory --keep-going test-all COVERAGE="-m coverage run"; status=$$?; \
		$(BIN)/python -m coverage combine --quiet && \
		$(BIN)/python -m coverage report --skip-covered --sort cover && exit $$status

test-gpu: $(READY)  ## run the tests that need a GPU
	$(BIN)/python -m pytest tests -m gpu $(ARGS)

# Tests of the dashboard are skipped, visibly, where there is no Chromium.
browser:  ## install Chromium from the distribution, for the tests of the dashboard, if it is missing
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

bench: $(READY)  ## run every benchmark, ours beside its peers
	@set -e; for file in $$(grep -l '^if __name__ == "__main__"' benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python "$$file"; \
	done

lint: $(READY)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## put the code into its usual form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and alone: pip then takes the build that is at hand (a CPU build on a machine without
# GPUs) before any other package can ask for a wider choice.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL_PINNED) hatchling editables
	$(PIP_INSTALL_PINNED) --no-build-isolation -e ".[dev,examples,bench]"
	@# On all cores, where pip would compile on one. Some packages have templates that are not Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# An environment that sees all packages of the first one and has its own beside them.
$(FRAMEWORKS_READY): $(READY)
	$(BIN)/python -m venv --without-pip $(FRAMEWORKS)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> "$$($(FRAMEWORKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/packages_of_dev.pth"
	$(BIN)/python -m pip --python $(FRAMEWORKS)/bin/python install --quiet --disable-pip-version-check \
		-c constraints.txt "jax>=0.4.35" "tensorflow>=2.16" "tf-keras>=2.16"
	touch $@
