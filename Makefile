# Everything a person types here works on a fresh machine with Python 3.11 and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SYSTEM_PACKAGES := chromium prometheus postgresql iproute2
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1
export RAY_DEDUP_LOGS ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help setup demo test lint format mutants bench bench-overlap bench-training bench-planned bench-models bench-queues bench-seeing image-test bench-resume bench-checkpoints bench-reduces bench-compiled kill-test bench-service system-packages clean

help:
	@echo "make demo           install, start a local Slotline, train two jobs, show where the time went"
	@echo "make test           install, run every test"
	@echo "make setup          install into $(VENV) only"
	@echo "make lint           ruff check and format check;  make format  rewrites"
	@echo "make mutants        small changes that no test notices, for SLOTLINE_MUTANTS_S seconds (600)"
	@echo "make bench          the scheduler's and the engine's benchmarks"
	@echo "make bench-overlap  pipelines over rate-limited links, beside torch's own (root)"
	@echo "make bench-training whole training jobs, beside torch's own pipelining and one process (6 minutes)"
	@echo "make bench-planned  steps and memory of five jobs as planned, beside what was measured"
	@echo "make bench-models   public models in three layouts, beside training them plainly (20 minutes)"
	@echo "make bench-seeing   what it costs to see a step: slots, reports, metrics, traces (10 minutes)"
	@echo "make image-test     what the images install, in empty environments, and a job in it (TORCH_INDEX=...; 10 minutes)"
	@echo "make kill-test      three replicas on PostgreSQL, one always killed or frozen, for SLOTLINE_KILL_TEST_S seconds (300)"
	@echo "make bench-service  submissions beside Ray's Jobs API, waits of clients in a crowd, hostile bodies (6 minutes)"
	@echo "make bench-reduces  sums of gradients behind a step and beside it, over rate-limited links (root)"
	@echo "make bench-compiled steps of stages with and without training.compile, and what compiling takes (5 minutes)"
	@echo "make bench-queues   10,000 jobs on 10,000 accelerators in simulated time, beside first come first served"
	@echo "make bench-resume   checkpoints of five layouts resumed on the others: the next step's differences (5 minutes)"
	@echo "make bench-checkpoints  what a save costs training: waited for, and written while it goes on"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11, or name one with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Slotline and what it needs into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/slotline demo

# Debian packages that some tests drive: a browser, a real Prometheus, a real PostgreSQL, network namespaces.
system-packages:
	@missing=""; for p in $(SYSTEM_PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then echo "not installed:$$missing; the tests that need them skip themselves"; exit 0; fi; \
	echo "installing$$missing"; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

test: setup system-packages
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: setup
	$(BIN)/python -m tests.mutants

bench: setup
	$(BIN)/python -m tests.benchmarks

bench-overlap: setup
	$(BIN)/python -m tests.benchmarks.overlap_cpu

bench-training: setup
	$(BIN)/python -m tests.benchmarks.training

bench-planned: setup
	$(BIN)/python -m tests.benchmarks.planned

# In a folder of their own: torchvision's wheels are for torch with CUDA, and where its operators do not load, transformers,
# which imports it wherever it is installed, does not load either.
$(VENV)/models/.ready: constraints.txt | setup
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(VENV)/models timm torchvision
	@touch $@

bench-models: $(VENV)/models/.ready
	$(BIN)/python -m tests.benchmarks.models $(MODELS_ARGS)

bench-reduces: setup
	$(BIN)/python -m tests.benchmarks.reduces

bench-compiled: setup
	$(BIN)/python -m tests.benchmarks.compiled

bench-queues: setup
	$(BIN)/python -m tests.benchmarks.queues

bench-resume: setup
	$(BIN)/python -m tests.benchmarks.resuming

bench-checkpoints: setup
	$(BIN)/python -m tests.benchmarks.checkpoints

bench-seeing: setup
	$(BIN)/python -m tests.benchmarks.seeing --model demo --pairs 40 --steps 5
	$(BIN)/python -m tests.benchmarks.seeing

# Not part of `make test`: minutes, gigabytes, and an index of torch's CPU wheels.
image-test: setup
	@test -n "$(TORCH_INDEX)" || { echo "make: name the index of torch's CPU wheels: make image-test TORCH_INDEX=..."; exit 1; }
	SLOTLINE_IMAGE_TESTS=1 TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m pytest tests/deploy/test_installed.py

# SLOTLINE_KILL_TEST_SEED=... for another course of events
kill-test: setup system-packages
	SLOTLINE_KILL_TEST_S=$${SLOTLINE_KILL_TEST_S:-300} $(BIN)/python -m pytest -s -n0 -p no:timeout tests/service/replicas

bench-service: setup system-packages
	$(BIN)/python -m tests.benchmarks.service

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info
