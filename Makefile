# One word, one thing to do. `make train` and `make test` work from a bare clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FAST := tests/schedule tests/plan tests/config tests/test_layers.py tests/runtime/test_one_step.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: env train test-fast test coverage size test-full test-slow test-slurm soak style lint bench mutants gpu-check clean

env: $(VENV)/.ready  ## .venv with everything in it; nothing to do when that is up to date

# torch goes first and pinned: a plain `torch` would bring the newest build with gigabytes of CUDA packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[all]'
	touch $@

train: env  ## the default experiment on two ranks; make train ARGS="steps=50 recompute.mode=inline"
	$(BIN)/pipetrain train $(ARGS)

test-fast: env style  ## the inner loop: style, the rooms that load no torch, one step of each family on one rank
	$(PYTEST) -n 2 -m "not slow" $(FAST)

test: env lint  ## every test but the slow ones
	$(PYTEST) -n 3 --dist worksteal -m "not slow" tests

coverage: env  ## the branches that `make test` runs, in ranks and commands too
	rm -rf .coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n 3 --dist worksteal -m "not slow" tests
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-empty

size: env  ## lines of the tests, and seconds of their last run; fails where a file is too long
	$(BIN)/python -m tests.size

test-full: test test-slow test-slurm  ## and the slow ones

test-slurm: env  ## jobs of a real SLURM cluster on this machine; needs root, gets SLURM with apt-get
	$(PYTEST) -m slurm $(ARGS) tests/slurm

test-slow: env  ## and what needs root; make test-slow ARGS=--turns=8: those of changed files, an eighth of the others
	$(PYTEST) -n 3 --dist worksteal -m "(slow or root) and not slurm" $(ARGS) tests

soak: env  ## 200 random kills of real runs, about half an hour; make soak ARGS="--kills=20 --json=soak.json"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

style: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style  ## style and types
	$(BIN)/mypy

bench: env  ## the comparisons of benchmarks/
	$(BIN)/pipetrain bench $(ARGS)

mutants: env  ## named one-line breakages, each of which must turn a test red
	$(BIN)/python -m tests.mutants $(ARGS)

gpu-check:  ## what only CUDA can do; needs torch and pytest in $(PYTHON), nothing else
	$(PYTHON) -m pytest -p no:cacheprovider -c tests/gpu.ini -m gpu -k "not sanitized" --durations=5 tests/gpu
	TORCH_CUDA_SANITIZER=1 $(PYTHON) -m pytest -p no:cacheprovider -c tests/gpu.ini -m gpu -k "sanitized or slow_producer" tests/gpu
	$(PYTHON) -m benchmarks.copies
	$(PYTHON) -m benchmarks.command replay --rounds=1 --json=gpu-check.json

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .coverage .ruff_cache .hypothesis
