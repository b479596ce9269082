# `make quickstart` and `make test` each set up .venv by themselves; a second call finds it there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help install quickstart test test-all lint clean

help:
	@echo "make quickstart   install into .venv and train a tiny model, start to finish"
	@echo "make test         install what the tests need and run them (CPU, offline, about 20 minutes on 2 cores)"
	@echo "make test-all     the same with the slow ones"
	@echo "make lint         ruff"

# torch first and alone: its pin brings the build that fits this machine.
$(VENV)/installed: setup.cfg constraints.txt
	@echo "installing into $(VENV) with $(PYTHON) (a minute or two; the wheels of torch are large)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) --editable '.[test]'
	@touch $@

install: $(VENV)/installed

quickstart: $(VENV)/installed
	@$(BIN)/deepseek-ft train quickstart --new

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed-test
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info
