# make demo · make test · make lint · make clean
#
# Each target does all of its own set-up. By default it makes .venv with pinned packages. To use an environment of
# yours, `make test VENV=path/to/venv`; to use an interpreter as it is, `make test VENV= PYTHON=python`. A torch that is
# there is never replaced.

PYTHON ?= python3
VENV ?= .venv

SOURCES := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STATE := build/make
else
PY := $(VENV)/bin/python
STATE := $(VENV)/make
endif
CLANG_FORMAT := $(PY) -c "import clang_format; clang_format.clang_format()"
PIP := $(PY) -m pip --disable-pip-version-check install --quiet

# An environment is told by its files: what is older than its inputs is made again.
INSTALLED := $(STATE)/installed
BUILT := $(STATE)/built
LINTERS := $(STATE)/linters

.PHONY: demo test lint format clean
.DELETE_ON_ERROR:

demo: $(BUILT)
	$(PY) -m pacache_torch demo $(DEMO_ARGS)

test: $(BUILT)
	$(PY) -m pytest $(TEST_ARGS)

lint: $(LINTERS) $(BUILT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

format: $(LINTERS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $$(git ls-files '*.cpp' '*.h')

ifneq ($(strip $(VENV)),)
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
$(INSTALLED): $(VENV)/bin/python
endif

$(INSTALLED): requirements/torch.txt requirements/build.txt requirements/test.txt
	$(PY) -c "import torch" 2>/dev/null || $(PIP) -r requirements/torch.txt
	$(PIP) -r requirements/test.txt
	@mkdir -p $(STATE) && touch $@

$(BUILT): $(INSTALLED) $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --editable .
	@mkdir -p $(STATE) && touch $@

$(LINTERS): $(INSTALLED) requirements/lint.txt
	$(PIP) -r requirements/lint.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info .venv
	rm -f pacache_torch/*.so pacache_torch/_built_with.json
