# The things a person does with a checkout. Every target installs first when it has to.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install serve test test-full test-core golden mutations sanitize check format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

install: $(STAMP)  ## a .venv in the checkout with everything the tests and checks need

# A virtual environment is not moved or reused across interpreters: start over when anything it depends on changes.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# To serve needs far less than to test: no PyTorch where the native executor runs.
SERVING := $(VENV)/.serving
$(SERVING): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	@echo "Installing Noria into $(VENV); this happens once and takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@$(BIN)/python -c "import sys; from noria.ops.native import why_unavailable; sys.exit(why_unavailable() is not None)" || \
		$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[torch]'
	@touch $@

PORT ?= 8000
MODEL ?=

serve: $(if $(wildcard $(STAMP)),$(STAMP),$(SERVING))  ## serve MODEL (default: a small one, fetched once) on 127.0.0.1, PORT=8000
	$(BIN)/noria serve $(MODEL) --host 127.0.0.1 --port $(PORT)

test: $(STAMP)  ## what CI runs: some 15 to 20 minutes on 2 cores
	$(BIN)/python -m pytest -m 'not full'

test-full: $(STAMP)  ## everything, with the larger models and the long runs
	$(BIN)/python -m pytest -s

test-core: $(STAMP)  ## the torch-free layers, with torch and transformers made unimportable
	$(BIN)/python -m pytest --no-torch -m 'not full' tests/core tests/kv tests/text tests/files

golden: $(STAMP)  ## rewrite the plans that are kept on file, and say what changed
	$(BIN)/python tests/core/golden_plans.py

mutations: $(STAMP)  ## plant faults in the scheduler and KV memory, one at a time: each must make a test fail
	$(BIN)/python scripts/mutations.py

SANITIZERS := address undefined thread
KERNEL_FLAGS := -march=x86-64-v4 -mavx512bf16 -ffp-contract=off -Wno-ignored-attributes -DNORIA_EMULATE_AMX

sanitize:  ## the native executor's own checks under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	@mkdir -p build/sanitize
	@for s in $(SANITIZERS); do \
		echo "$$s:" && \
		$(CXX) -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=$$s -fno-sanitize-recover=all $(KERNEL_FLAGS) -pthread \
			$(filter-out csrc/module.cpp,$(wildcard csrc/*.cpp)) -o build/sanitize/$$s && \
		build/sanitize/$$s || exit 1; \
	done

check: $(STAMP)  ## formatting, lint, types, layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the files the way `check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
