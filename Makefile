# What a developer types. Every target prepares .venv by itself, so a fresh clone needs only git, make and Python 3.11 or newer.
#
#   PYTHON=...    interpreter to build .venv with (default: the first of python3.11, 3.12, 3.13, 3 that is new enough)
#   PIP_ARGS=...  extra arguments for pip, for instance an index with a CPU-only build of PyTorch
#   ARGS=...      extra arguments for pytest, for instance ARGS='tests/store -k probe'

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUIET := -qq --progress-bar off
ARGS ?=
BENCHMARKS := $(basename $(notdir $(shell grep -l __main__ benchmarks/*.py)))
PIP_ARGS ?=
PYTHON ?=

.PHONY: help demo test drills check format up down bench secrets system clean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(STAMP) ## train, kill, resume, and prove that nothing was lost (about two minutes)
	@$(BIN)/torchrelay demo

test: $(STAMP) ## all tests but the drills
	@$(BIN)/pytest -m "not drill" -n 2 --dist loadfile $(ARGS)

drills: $(STAMP) ## kill experiments with real processes
	@$(BIN)/pytest -m drill $(ARGS)

check: $(STAMP) ## formatting, lint, types, import contracts, house rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_tidy.py

format: $(STAMP) ## let ruff rewrite the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

up: $(STAMP) ## object store, Prefect server and flows on this machine
	@$(BIN)/torchrelay up

down: $(STAMP) ## stop what `make up` started; its data stay
	@$(BIN)/torchrelay down

bench: $(PEERS) ## run every benchmark; each prints its numbers and its machine
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

secrets: ## credentials for infra/docker-compose.yml, generated once
	@"$$(infra/find-python $(PYTHON))" infra/credentials.py

# Everything below one environment: the tools that build the package are pinned too, so nothing is resolved at build time.
$(STAMP): pyproject.toml constraints.txt
	@[[ -x $(BIN)/python ]] || { \
	  python="$$(infra/find-python $(PYTHON))"; \
	  echo "Creating $(VENV) with $$python"; \
	  "$$python" -m venv $(VENV); }
	@echo "Installing into $(VENV) (PyTorch, Prefect and the tools of the tests; a few minutes the first time)"
	@$(PIP) install $(QUIET) $(PIP_ARGS) -c constraints.txt hatchling editables
	@$(PIP) install $(QUIET) $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[flows,local,dev]'
	@touch $@

# Other checkpoint engines, which only the benchmarks need.
$(PEERS): $(STAMP)
	@$(PIP) install $(QUIET) $(PIP_ARGS) -c constraints.txt setuptools
	@$(PIP) install $(QUIET) $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[flows,local,dev,bench]'
	@touch $@

# Optional: the tests that parse the compose files skip, and say so, where this is missing.
system: ## Debian packages some tests use (root and apt only; elsewhere it does nothing)
	@if [[ "$$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then \
	  echo "not root on a Debian-like system: no packages installed"; \
	elif ! command -v docker-compose >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends docker-compose >/dev/null; } || \
	    echo "docker-compose could not be installed: the tests that need it will skip"; \
	fi

clean: ## remove .venv, caches and build products; runs under .torchrelay stay
	@[[ ! -x $(BIN)/torchrelay ]] || $(BIN)/torchrelay down || true
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
