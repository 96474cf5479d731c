# Everything a fresh machine needs is set up on the way: `make run` or `make test` is the first command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test bench lint format clean
.DELETE_ON_ERROR:

help:  ## show these lines
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

run: $(READY)  ## train examples/digits.py with two workers and show the Result
	$(BIN)/python examples/digits.py --name "digits-$$(date +%Y%m%d-%H%M%S)"

test: $(READY)  ## run all tests
	$(BIN)/python -m tests

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation -e ".[dev,examples,bench]"
	touch $@
