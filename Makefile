# make demo · make test · make soak · make bench · make sanitize · make fuzz · make coverage · make lint · make clean
#
# Each target does all of its own set-up. By default it makes .venv with pinned packages. To use an environment of
# yours, `make test VENV=path/to/venv`; to use an interpreter as it is, `make test VENV= PYTHON=python`. A torch that is
# there is never replaced. The NPU tests have an environment of their own, .venv-npu (VENV_NPU=...), because torch_npu
# breaks `import torch` where there is no CANN.

PYTHON ?= python3
VENV ?= .venv
VENV_NPU ?= .venv-npu
VENV_VLLM ?= .venv-vllm

NATIVE := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.inc)
PACKAGE := $(NATIVE) $(shell find pacache_torch -name '*.py' -o -name '*.txt' -o -name '*.json' ! -name '_built_with.json')

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STATE := build/make
else
PY := $(VENV)/bin/python
STATE := $(VENV)/make
endif
PY_NPU := $(abspath $(VENV_NPU))/bin/python
STATE_NPU := $(VENV_NPU)/make
PY_VLLM := $(abspath $(VENV_VLLM))/bin/python
STATE_VLLM := $(VENV_VLLM)/make

INSTALL := -m pip --disable-pip-version-check install --quiet
CLANG_FORMAT := $(PY) -c "import clang_format; clang_format.clang_format()"

.PHONY: demo demo-npu test test-cpu test-npu test-vllm soak bench bench-npu bench-readme sanitize fuzz coverage cross
.PHONY: reliability build build-npu build-vllm lint format clean
.DELETE_ON_ERROR:

demo: build
	$(PY) -m pacache_torch demo $(DEMO_ARGS)

test: test-cpu test-npu

test-cpu: build
	$(PY) -m pytest --ignore tests/npu --ignore tests/vllm_engine $(TEST_ARGS)

# From tests/npu, so that the installed package is imported and not the source tree.
test-npu: build-npu
	cd tests/npu && $(PY_NPU) -m pytest . $(TEST_ARGS)

# A real vLLM engine generates through the operators. Not part of `make test`: its environment takes 2 GiB.
test-vllm: build-vllm
	cd tests/vllm_engine && $(PY_VLLM) -m pytest . $(TEST_ARGS)

# The long forms of some tests (an hour or so), and their figures into docs/reliability.md.
soak: build build-npu
	PACACHE_SOAK=1 $(PY) -m pytest tests/test_stateful.py tests/test_threads.py tests/test_processes.py \
	    tests/test_memory_use.py $(TEST_ARGS)
	cd tests/npu && PACACHE_SOAK=1 $(PY_NPU) -m pytest test_faults.py test_failures.py test_many_threads.py test_runtime.py \
	    test_device_suite.py -k 'faults or queued or gone or threads or memory or lives' $(TEST_ARGS)
	$(PY) tests/import_matrix.py
	cd tests/npu && $(PY_NPU) ../import_matrix.py
	$(PY) tests/reliability.py

# The demo on npu:0 of the simulated CANN.
demo-npu: build-npu
	cd tests/npu && $(PY_NPU) ../cann_sim/run.py -- $(PY_NPU) -m pacache_torch demo --device npu $(DEMO_ARGS)

# Leave the machine alone meanwhile. `make bench BENCH_ARGS=--quick` only shows that it runs.
bench: build
	$(PY) benchmarks/cpu_copy.py $(BENCH_ARGS)
	$(PY) benchmarks/host_cost.py $(BENCH_ARGS)

# Host cost of the NPU path, against torch_npu's own operators, on the simulated CANN.
bench-npu: build-npu
	$(PY_NPU) benchmarks/host_cost.py --npu simulated $(BENCH_ARGS)

# The README's tables and plots from what the two have measured last.
bench-readme: build
	$(PY) benchmarks/readme.py

# The C++ under sanitizers, needs g++ only; SANITIZE_ARGS=--quick leaves out the NPU path and most of the tests.
sanitize: build $(if $(filter --quick,$(SANITIZE_ARGS)),,build-npu)
	$(PY) tests/sanitizers/run.py cpu threads $(SANITIZE_ARGS)
ifeq ($(filter --quick,$(SANITIZE_ARGS)),)
	$(PY_NPU) tests/sanitizers/run.py npu
endif

# Calls at random, for half an hour and some minutes: FUZZ_ARGS="--calls 20000 --minutes 30". Needs clang.
fuzz: build
	$(PY) tests/fuzz/run.py $(FUZZ_ARGS)

# Lines of the CPU kernels and argument rules that tests and corpus run. Needs clang and llvm.
coverage: build
	$(PY) tests/fuzz/coverage.py

# The CPU side built for aarch64, and its copy kernels run under qemu. Needs g++-aarch64-linux-gnu and qemu-user-static.
cross: build
	$(PY) tests/cross/run.py

# The tables of docs/reliability.md, from what the long runs have recorded last.
reliability:
	$(PY) tests/reliability.py

lint: $(STATE)/linters build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

format: $(STATE)/linters
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $$(git ls-files '*.cpp' '*.h')

build: $(STATE)/built
build-npu: $(STATE_NPU)/built
build-vllm: $(STATE_VLLM)/built

# What an environment holds is told by its stamps: one that is older than what it was made from is made again.
ifneq ($(strip $(VENV)),)
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$@ $(INSTALL) --upgrade pip
$(STATE)/installed: $(VENV)/bin/python
endif

$(STATE)/installed: requirements/torch.txt requirements/build.txt requirements/bench.txt requirements/test.txt
	$(PY) -c "import torch" 2>/dev/null || $(PY) $(INSTALL) -r requirements/torch.txt
	$(PY) $(INSTALL) -r requirements/test.txt
	@mkdir -p $(@D) && touch $@

$(STATE)/built: $(STATE)/installed $(NATIVE)
	$(PY) $(INSTALL) --no-build-isolation --no-deps --editable .
	@mkdir -p $(@D) && touch $@

$(STATE)/linters: $(STATE)/installed requirements/lint.txt
	$(PY) $(INSTALL) -r requirements/lint.txt
	@touch $@

$(PY_NPU):
	$(PYTHON) -m venv $(VENV_NPU)
	$@ $(INSTALL) --upgrade pip

$(STATE_NPU)/installed: $(PY_NPU) requirements/torch.txt requirements/build.txt requirements/bench.txt requirements/test.txt \
    requirements/npu.txt
	$(PY_NPU) $(INSTALL) -r requirements/torch.txt -r requirements/npu.txt
	@mkdir -p $(@D) && touch $@

# Installed, not editable: the source tree holds the libraries of the other environment. Objects stay in build/.
$(STATE_NPU)/built: $(STATE_NPU)/installed $(PACKAGE)
	rm -rf build/lib* build/bdist*
	PACACHE_WITH_NPU=1 $(PY_NPU) $(INSTALL) --no-build-isolation --no-deps --force-reinstall .
	@mkdir -p $(@D) && touch $@

$(PY_VLLM):
	$(PYTHON) -m venv $(VENV_VLLM)
	$@ $(INSTALL) --upgrade pip

$(STATE_VLLM)/installed: $(PY_VLLM) requirements/torch.txt requirements/build.txt requirements/bench.txt \
    requirements/test.txt requirements/vllm.txt requirements/vllm_needs.txt
	$(PY_VLLM) $(INSTALL) -r requirements/torch.txt -r requirements/vllm_needs.txt
	$(PY_VLLM) $(INSTALL) --no-deps -r requirements/vllm.txt
	@mkdir -p $(@D) && touch $@

# Installed, not editable, so that vLLM finds the plugin as a user's vLLM does.
$(STATE_VLLM)/built: $(STATE_VLLM)/installed $(PACKAGE)
	rm -rf build/lib* build/bdist*
	PACACHE_WITH_NPU=0 $(PY_VLLM) $(INSTALL) --no-build-isolation --no-deps --force-reinstall .
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf build dist *.egg-info .venv .venv-npu .venv-vllm tests/cann_sim/build
	rm -f pacache_torch/*.so pacache_torch/_built_with.json
