# Two commands for a newcomer: `make demo` shows what the bench is for, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "cxlbench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(STAMP)  ## four tiers of equal DRAM under one multi-turn workload (about a minute)
	$(BIN)/cxlbench demo

test: $(STAMP)  ## all tests (minutes)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff and the import arrows
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lint]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)  ## mypy, strict
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[types]'
	$(BIN)/mypy

clean:  ## remove the environment and what runs left
	rm -rf $(VENV) .tox build dist results .pytest_cache .mypy_cache .ruff_cache .hypothesis
