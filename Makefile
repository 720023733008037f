# make setup | demo | test | test-benchmarks | test-browser | test-compiler | test-packaging | test-docs | test-titan | test-nightly | lint | bench | gpu | docs | docs-serve
# The first target that is run makes .venv with pip; later runs reuse it until pyproject.toml changes.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
# torch runs on one thread: tests and benchmarks use processes, and results must not depend on cores.
RUN := OMP_NUM_THREADS=1 $(PY)
# The many processes of a test run read the bytecode that the first one wrote.
export PYTHONDONTWRITEBYTECODE :=
WORKERS ?= 2
# Of the targets that CI runs beside `make test`; 0: none, the tests run in the process that collected them.
WORKERS_BESIDE ?= $(WORKERS)
# A file's tests share captured models and worlds: one worker runs them all, the longest files first (tests/conftest.py).
BY_FILE = --dist loadfile --no-loadscope-reorder
PYTEST = $(RUN) -m pytest -n $(WORKERS) $(BY_FILE)
PYTEST_BESIDE = $(RUN) -m pytest -n $(WORKERS_BESIDE) $(BY_FILE)
# Where tests share nothing, whoever is idle takes one.
PYTEST_ALONE = $(RUN) -m pytest -n $(WORKERS_BESIDE) --dist worksteal
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
SWEEP_ARGS ?=
DEMO_ARGS ?=
# The first of these that runs and is new enough makes the virtual environment.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: setup demo test test-benchmarks test-browser test-compiler test-packaging test-docs test-titan test-nightly lint format bench gpu docs docs-serve clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# The stamp is a copy of pyproject.toml, so that a checkout that only changes its date installs nothing.
$(STAMP): pyproject.toml
	@if cmp -s pyproject.toml $(STAMP); then touch $(STAMP); else $(MAKE) --no-print-directory install; fi

.PHONY: install
install:
	@test -x $(PY) || test -n "$(PYTHON)" || { echo "fxpar needs Python 3.11 or newer; install it or say make PYTHON=/path/to/python"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --no-compile -e ".[dev]"
	@# Whoever imports a file first writes its bytecode: all files would take three times as long as those that are used.
	@cp pyproject.toml $(STAMP)

demo: setup
	$(RUN) -m fxpar train --demo --compare static $(DEMO_ARGS)

# Tests of the library. Those that test something else (benchmarks, pages, packages, documentation, torchtitan) each have a
# target of their own.
test: setup
	$(PYTEST) -m "not (benchmarks or browser or packaging or docs or titan or compiler or nightly)" \
		--ignore tests/docs --ignore tests/recipes --ignore tests/titan $(PYTEST_ARGS)

# Every benchmark in its tiny form.
test-benchmarks: setup
	$(PYTEST_ALONE) -m "benchmarks and not (titan or nightly)" tests/benchmarks $(PYTEST_ARGS)

# The pages of `fxpar viz` in a headless Chromium; skipped without one.
test-browser: setup
	$(PYTEST_BESIDE) -m "browser and not nightly" tests/viz $(PYTEST_ARGS)

# Under torch.compile: with Dynamo, and kernels by a C++ compiler.
test-compiler: setup
	$(PYTEST_BESIDE) -m "compiler and not nightly" $(PYTEST_ARGS) tests/test_dynamo.py tests/distributed/test_gloo.py \
		tests/runtime/test_bound.py

# Every way to build, install and import the package.
test-packaging: setup
	$(RUN) -m pytest -m packaging tests/test_packaging.py $(PYTEST_ARGS)

# Every code block of README.md and docs/, the site, the example package, and the examples. The search of the site needs a
# headless Chromium, and is skipped without one.
test-docs: setup
	$(PYTEST_ALONE) -m "not nightly" tests/docs tests/test_docs.py tests/test_examples.py $(PYTEST_ARGS)

# The recipes, and torchtitan in processes of its own, stock and with fxpar: several minutes.
test-titan: setup
	$(PYTEST_BESIDE) -m "not nightly and (titan or not benchmarks)" tests/titan tests/recipes tests/benchmarks $(PYTEST_ARGS)

# Many times as many examples of each property, and the cases that are too many for every run: an hour.
test-nightly: setup
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile=nightly $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/pyrefly check

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The figures of docs/benchmarks.md; goes on where it was stopped, as `gpu` does.
bench: setup
	$(RUN) benchmarks/run_cpu.py $(BENCH_ARGS)

# What waits for a GPU; goes on where it was stopped. With a Python that has torch already, and no .venv:
# make gpu VENV= PYTHON=python3
gpu: $(if $(VENV),setup)
	OMP_NUM_THREADS=1 $(if $(VENV),$(PY),$(PYTHON)) benchmarks/run_gpu.py $(GPU_ARGS)

# All causal model types of transformers against plain torch, half an hour of CPU time; goes on where it was stopped.
sweep: setup
	$(RUN) benchmarks/sweep.py --page docs/model_types.md $(SWEEP_ARGS)

# The site opens from disk: site/index.html, with its search. Nothing is loaded from elsewhere.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find fxpar passes recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +
