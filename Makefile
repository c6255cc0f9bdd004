# make demo   serve five kinds of PEFT adapters in one mixed batch and compare them with PEFT (no GPU needed)
# make test   the test suite; GPU tests are skipped where there is no GPU
# Both set up everything on a fresh machine. PYTHON=python3.12 chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
SGLANG ?= 0.5.17
VENV := .venv-$(VERSION)-sglang-$(SGLANG)
BIN := $(VENV)/bin
# No BLAS thread pools fighting over the cores: the models of the tests are tiny.
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-latest env clean

demo: env
	$(RUN) $(BIN)/scute demo

test: env
	$(RUN) $(BIN)/python -m pytest tests -q

# One module of the tests on the newest SGLang that the package is tested with, on the CPU.
test-latest:
	$(MAKE) SGLANG=0.5.23 env
	$(RUN) .venv-$(VERSION)-sglang-0.5.23/bin/python -m pytest tests/test_latest.py -q

env: $(VENV)/.extension

$(VENV)/.packages: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scute_sgl needs Python 3.11 or newer; choose one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q sglang==$(SGLANG) peft pytest ninja pybind11 setuptools wheel
	touch $@

# An editable install only writes entry points and builds csrc/ in place; .py files need no rebuild.
$(VENV)/.extension: $(VENV)/.packages setup.py $(wildcard csrc/* csrc/cpu/*)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf .venv-* build *.egg-info python/*.egg-info python/scute_sgl/_C*.so
