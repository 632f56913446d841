# `make train` trains a small GPT-2 on a 2 x 2 grid of processes; `make test` checks the project.
# Both make an environment of their own in .venv; a second call installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEEP ?=
# Processes that run tests, whole files each, and start ranks of their own.
WORKERS ?= 2
# Of what is installed, and of what builds this package (older pips read the first for both).
CONSTRAINTS := .ci/constraints.txt
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip

GRID ?= 2x2
RANKS ?= 4
PLAN ?= 2d
SIZE ?= mini
STEPS ?= 80
TRAIN_FLAGS ?=

# One thread a process: the processes share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: train test docs data clean

train: $(VENV)/.tutorials data
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) tutorials/train_gpt2.py \
		--grid $(GRID) --plan $(PLAN) --size $(SIZE) --steps $(STEPS) $(TRAIN_FLAGS)

data: $(VENV)/.tutorials
	$(BIN)/python tutorials/text.py

test: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(DEEP),--deep)

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -W docs docs/_build

# torch by exact version and first: left to the extras, pip may choose another build of it.
$(VENV)/.torch: $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.tutorials: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable '.[tutorials]'
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable '.[test,tutorials,docs]'
	touch $@

clean:
	rm -rf $(VENV) tutorials/.data docs/_build
