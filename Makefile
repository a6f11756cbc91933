# Everything a person types here works on a fresh machine with Python 3.11 or 3.12 and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3.11)
VENV := .venv
OTHER_RAY ?= 2.59.0
OTHER_TORCH ?= 2.15.0
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_READY := $(VENV)/.demo-ready
READY := $(VENV)/.ready
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
COMPILE_KERNELS = $(BIN)/python -c "from service.scheduler.planner import compile_kernels; compile_kernels()"
SYSTEM_PACKAGES := chromium prometheus postgresql iproute2
PYTEST_ARGS ?=
# Processes of tests: one of them often waits for Ray.
LANES ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")

# Tests of one file run in one process, all that start Ray in one (tests/conftest.py); the marks are told in tests/README.md.
# The few that fail are tried once more at the end, alone (tests/second_try.py).
PYTEST = $(BIN)/python -m pytest -n $(LANES) --dist loadgroup --no-loadscope-reorder --second-try
BY_NIGHT := slow or matrix or postgres

unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export RAY_DEDUP_LOGS ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help setup demo test test-all lint format mutants bench bench-overlap bench-training bench-planned bench-models bench-queues bench-seeing image-test bench-resume bench-checkpoints bench-sharded-saves bench-large-model bench-reduces bench-compiled chaos test-cluster kill-test kind-test upgrade-test ray-test torch-test gpu-check bench-service system-packages clean

help:
	@echo "make demo           install, start a local Slotline, train two jobs, show where the time went"
	@echo "make test           install, run the tests that a change needs (10 minutes);  make test-all  every test"
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
	@echo "make kind-test      the chart on a kind cluster: install, helm test, a job, an upgrade (TORCH_INDEX=... KUBERAY_CHART=...; docker)"
	@echo "make upgrade-test   FROM=revision: that control plane upgraded to this tree's while a job trains on a local Ray (1 minute; DATABASE=postgresql)"
	@echo "make ray-test       what the control plane asks of Ray, asked of the minor version before ours too (2 minutes)"
	@echo "make torch-test     the worker's tests with another torch, OTHER_TORCH=version (gigabytes; TORCH_INDEX=... for CPU wheels; 10 minutes)"
	@echo "make gpu-check      the first hour on a machine with GPUs: ten checks up to the first failure, and one report, gpu-check.md"
	@echo "make test-cluster   whole jobs on a cluster of network namespaces, part of test-all (root; 4 minutes)"
	@echo "make chaos          16 kinds of faults on such a cluster: noticed when, named how, survived (root; up to 30 minutes)"
	@echo "make kill-test      three replicas on PostgreSQL, one always killed or frozen, for SLOTLINE_KILL_TEST_S seconds (300)"
	@echo "make bench-service  submissions beside Ray's Jobs API, waits of clients in a crowd and beside 10,000 waiting jobs, hostile bodies (8 minutes)"
	@echo "make bench-reduces  sums of gradients behind a step and beside it, over rate-limited links (root)"
	@echo "make bench-compiled steps of stages with and without training.compile, and what compiling takes (5 minutes)"
	@echo "make bench-queues   10,000 jobs on 10,000 accelerators in simulated time, beside first come first served"
	@echo "make bench-resume   checkpoints of five layouts resumed on the others: the next step's differences (5 minutes)"
	@echo "make bench-checkpoints  what a save costs training: waited for, and written while it goes on"
	@echo "make bench-sharded-saves  peak memory of a save and a restore: gathered, and each worker its own part"
	@echo "make bench-large-model  the start of a model larger than its host's memory: in memory, and in files (root)"

setup: $(READY)

# What runs Slotline, without the tools of developers.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or 3.12, or name one with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Slotline and what it needs into $(VENV) (a minute or two the first time)"
	@$(PIP_INSTALL) --no-compile --editable '.[demo]'
	@touch $@

# Of its modules those are compiled that are imported, beside the kernels.
$(DEMO_READY): $(INSTALLED)
	@$(COMPILE_KERNELS) & $(BIN)/python -c "import ray, service.control_plane, worker.tasks.verify" && wait $$!
	@touch $@

# The other core compiles kernels meanwhile.
$(READY): $(INSTALLED)
	@echo "installing the tools of developers into $(VENV)"
	@$(COMPILE_KERNELS) & $(PIP_INSTALL) --no-compile --editable '.[dev]' && wait $$!
	@touch $@

demo: $(DEMO_READY)
	@$(BIN)/slotline demo

# Debian packages that some tests drive: a browser, a real Prometheus, a real PostgreSQL, network namespaces.
system-packages:
	@missing=""; for p in $(SYSTEM_PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then echo "not installed:$$missing; the tests that need them skip themselves"; exit 0; fi; \
	echo "installing$$missing"; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

# Of the scheduler's random problems a quarter, test-all takes them all.
test: export SLOTLINE_TEST_SHARE ?= 0.25
test: setup system-packages
	$(PYTEST) -m "not ($(BY_NIGHT))" $(PYTEST_ARGS)

test-all: setup system-packages
	$(PYTEST) $(PYTEST_ARGS)

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

bench-sharded-saves: setup
	$(BIN)/python -m tests.benchmarks.sharded_saves

bench-large-model: setup
	$(BIN)/python -m tests.benchmarks.large_model

bench-seeing: setup
	$(BIN)/python -m tests.benchmarks.seeing --model demo --pairs 40 --steps 5
	$(BIN)/python -m tests.benchmarks.seeing

# Not part of `make test`: minutes, gigabytes, and an index of torch's CPU wheels.
image-test: setup
	@test -n "$(TORCH_INDEX)" || { echo "make: name the index of torch's CPU wheels: make image-test TORCH_INDEX=..."; exit 1; }
	SLOTLINE_IMAGE_TESTS=1 TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m pytest tests/deploy/test_installed.py

# Run by an operator who has docker, kind, kubectl and helm; what it needs is told by the script.
kind-test: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" TORCH_INDEX="$(TORCH_INDEX)" KUBERAY_CHART="$(KUBERAY_CHART)" deploy/kind_test.sh

# The Ray before the one of constraints.txt, in an environment of its own.
$(VENV)/ray-$(OTHER_RAY)/.ready:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check "ray[default]==$(OTHER_RAY)"
	@touch $@

ray-test: setup $(VENV)/ray-$(OTHER_RAY)/.ready
	SLOTLINE_OTHER_RAY=$(VENV)/ray-$(OTHER_RAY) $(BIN)/python -m pytest tests/service/orchestrator/ray/test_ray_versions.py

# Another torch than the one of constraints.txt, in a folder in front of it.
$(VENV)/torch-$(OTHER_TORCH)/.ready: | setup
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --target $(@D) "torch==$(OTHER_TORCH)"
	@touch $@

torch-test: export PYTHONPATH = $(CURDIR)/$(VENV)/torch-$(OTHER_TORCH)
torch-test: export SLOTLINE_TEST_SHARE ?= 0.25
torch-test: setup $(VENV)/torch-$(OTHER_TORCH)/.ready
	$(PYTEST) -m "not ($(BY_NIGHT) or ray)" $(PYTEST_ARGS) tests/worker

upgrade-test: setup
	$(BIN)/python -m tests.benchmarks.upgrade $(FROM) $(DATABASE)

# On a machine with GPUs, with the extra cuda12 or cuda13 installed. GPU_CHECK_ARGS="--from lanes" goes on behind what was mended.
gpu-check: setup
	$(BIN)/python -m tests.gpu_check $(GPU_CHECK_ARGS)

# SLOTLINE_KILL_TEST_SEED=... for another course of events
kill-test: setup system-packages
	SLOTLINE_KILL_TEST_S=$${SLOTLINE_KILL_TEST_S:-300} $(BIN)/python -m pytest -s -n0 -p no:timeout tests/service/replicas

# Faults of every kind on a cluster of network namespaces (Linux, root): CHAOS_ARGS="--moments 3 --seed 7"
chaos: setup system-packages
	$(BIN)/python -m tests.benchmarks.chaos $(CHAOS_ARGS)

# Whole jobs on a cluster of network namespaces (Linux, root), part of test-all
test-cluster: setup system-packages
	$(BIN)/python -m pytest -n0 -v tests/cluster

bench-service: setup system-packages
	$(BIN)/python -m tests.benchmarks.service

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info
