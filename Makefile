# On a fresh machine with Python 3.11 or newer, `make demo` and `make test` create .venv, install, and run.
# Linux without an NVIDIA GPU: `make demo TORCH="torch torchvision --index-url https://download.pytorch.org/whl/cpu"` downloads far less.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
EXTRAS ?= dev,bench,rewards,data
JOBS ?= 2
CONFIG ?= tiny_flux
PROCESSES ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Two processes draw and train faster than one with two threads, and give the same bits as one.
LAUNCH := ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --multi_gpu --num_processes $(PROCESSES) --num_machines 1 \
	--main_process_port 0 --mixed_precision no --dynamo_backend no scripts/train.py
TRAIN := $(if $(filter 1,$(PROCESSES)),$(BIN)/solrl train,$(LAUNCH))
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=5

.PHONY: demo test test-slow test-long check docs install
.DEFAULT_GOAL := test

demo: $(STAMP)
	@run=runs/demo; n=1; while [ -e $$run ]; do n=$$((n + 1)); run=runs/demo-$$n; done; \
	$(TRAIN) $(CONFIG) --output.dir $$run && echo "Open $$run/report.html in a browser."

test: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not gpu and not ray"

test-slow: $(STAMP)
	$(PYTEST) -n $(JOBS) -m "slow and not long and not gpu" --timeout 600

test-long: $(STAMP)
	$(PYTEST) -n $(JOBS) -m "long and not gpu" --timeout 600

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python -m pip install -q -e '.[docs]'
	$(BIN)/sphinx-build -q -W -d site/.trees docs site && echo "Open site/index.html in a browser."

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install $(TORCH))
	$(BIN)/python -m pip install -e '.[$(EXTRAS)]'
	@touch $@
