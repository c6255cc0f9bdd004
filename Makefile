# make demo          serve five kinds of PEFT adapters in one mixed batch and compare them with PEFT (no GPU needed)
# make test          the test suite; GPU tests are skipped where there is no GPU (SGLANG_PLUGINS=scute may be set)
# make test-latest   a part of it on the newest SGLang release that the package is tested with
# make env           what both do first: a virtual environment with SGLang, PEFT and the built extension
# make clean         remove all of that
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer), MAX_JOBS=1 limits the compilers.

PYTHON ?= python3
SGLANG ?= 0.5.17
PEFT ?= 0.21.2
MAX_JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
export MAX_JOBS

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error no interpreter $(PYTHON) here; choose one with PYTHON=)
endif
VENV := .venv-$(VERSION)-sglang-$(SGLANG)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# No BLAS thread pools fighting over the cores: the models of the tests are tiny.
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# An editable install only writes entry points and builds csrc/ in place; .py files need no rebuild. The built file
# fits one torch, so the environment of another SGLang gets a copy of the package instead.
INSTALL ?= -e .
SOURCES := setup.py $(wildcard csrc/*.* csrc/cpu/*.*)
ifneq ($(INSTALL),-e .)
SOURCES += $(shell find python -name '*.py')
endif

.PHONY: demo test test-latest env clean

demo: env
	@$(RUN) $(BIN)/scute demo

test: env
	$(RUN) $(BIN)/python -m pytest tests -q

test-latest:
	@SCUTE_CPU_ONLY=1 $(MAKE) --no-print-directory SGLANG=0.5.23 INSTALL=. env
	$(RUN) .venv-$(VERSION)-sglang-0.5.23/bin/python -m pytest tests/test_latest.py -q

env: $(VENV)/.extension

$(VENV)/.packages: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scute_sgl needs Python 3.11 or newer; choose one with PYTHON=")'
	@echo "[1/2] $(VENV): installing SGLang $(SGLANG), its torch and PEFT $(PEFT) (several GB, minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq --upgrade pip
	@$(PIP) install -qq sglang==$(SGLANG) peft==$(PEFT) pytest matplotlib scikit-learn ninja pybind11 setuptools wheel
	@touch $@

$(VENV)/.extension: $(VENV)/.packages $(SOURCES)
	@echo "[2/2] $(VENV): building scute_sgl's C++ (and CUDA, where nvcc is found) with $(MAX_JOBS) jobs (minutes) ..."
	@$(PIP) install -qq --no-deps --no-build-isolation $(INSTALL)
	@touch $@

clean:
	rm -rf .venv-* build *.egg-info python/*.egg-info python/scute_sgl/_C*.so
