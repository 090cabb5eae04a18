# bertsmith: `make demo` shows it, `make test` proves it. `make` alone lists the rest.

PYTHON ?= python3
# For two cores: tests of servers and browsers wait for a third of their time.
PYTEST_WORKERS ?= 3
ENV := $(or $(VIRTUAL_ENV),.venv)
BIN := $(ENV)/bin

# This checkout's code, even where an active environment has another one installed.
export PYTHONPATH := $(CURDIR)/src
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# seqeval has no wheel; old versions of pip would build it with whatever setuptools they have just installed.
export PIP_USE_PEP517 := 1
# Compiled code is kept even where an environment says otherwise: hundreds of test files and processes need it.
export PYTHONDONTWRITEBYTECODE :=

# One torch thread per worker: more would fight over the same cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal
# pip would compile 20,000 files, one after the other, before anything else begins; most are never imported.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
# torch by its version alone: its build depends on the machine (docs/dependencies.md).
locked = $(INSTALL) --require-hashes -r deploy/lock/$(1).txt && $(INSTALL) -r deploy/lock/torch.txt && \
	$(INSTALL) --no-deps --no-build-isolation -e .

.DEFAULT_GOAL := help
.PHONY: help setup demo browser lint test test-all test-gpu pictures docs release format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(ENV)/.installed ## make .venv with everything the demo and the tests need

demo: $(ENV)/.runtime ## see bertsmith at work, in a few minutes
	@$(BIN)/python -m bertsmith demo

browser: ## the Chromium that the tests of the page drive; needs root and a Debian or Ubuntu
	apt-get install --yes --quiet chromium fonts-noto-color-emoji

lint: setup ## style, types and the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# pytest comes last, so that its closing line is the last line.
test: lint ## the checks, then every behaviour on small counts
	$(PYTEST)

test-all: lint ## the checks, then every behaviour on full counts, with the lines that no test reaches
	$(MAKE) docs
	$(PYTEST) --full --cov --cov-report=term

# A machine with a GPU has a torch of its own, so nothing is installed here.
test-gpu: ## the tests that need a CUDA GPU, with the environment at hand
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu

docs: $(ENV)/.documented ## the docs site with the API reference, in build/site; links are strict
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "see it: python -m http.server -d build/site"

release: $(ENV)/.documented ## sdist and wheel in dist/, checked: contents, metadata, and the wheel by itself
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python deploy/check_release.py dist

pictures: setup ## redo the pictures and printed outputs of README and docs; needs Chromium (make browser)
	$(BIN)/python bench/pictures.py

format: setup ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built; the environment stays
	rm -rf build dist .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(ENV)

$(ENV)/.runtime: pyproject.toml $(wildcard deploy/lock/*) | $(BIN)/python
	$(call locked,demo)
	@touch $@

$(ENV)/.installed: pyproject.toml $(wildcard deploy/lock/*) | $(BIN)/python
	$(call locked,test)
	@$(BIN)/python -m compileall -q src $(ENV)/lib > /dev/null 2>&1 & # on another core, while the checks run
	@touch $(ENV)/.runtime $@

# The site and the release have packages of their own, which neither the demo nor the tests wait for.
$(ENV)/.documented: $(ENV)/.installed
	$(INSTALL) --require-hashes -r deploy/lock/docs.txt
	@touch $@
