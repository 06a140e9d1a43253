# make run   execute the notebooks in order on the embedded nano checkpoint, into build/ (also as HTML)
# make test  every check: style, import rules, unit tests, kernels in the interpreter, kernels for sm_90a, notebooks
# make lab   JupyterLab
# On an H200: make run STACK=h200 (Python 3.12; installs the GPU extras with the versions that were measured).

PYTHON ?= python3
STACK ?= cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(STACK)
SM90A := .venv-sm90a
EXTRAS_cpu := lab,dev
EXTRAS_h200 := lab,gpu,dev
PIP := -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
REPORTS := build/reports

.PHONY: run test lab lint unit interpreter sm90a notebooks clean

run: $(READY)
	$(BIN)/python -m tools.run_notebooks

lab: $(READY)
	$(BIN)/jupyter lab --notebook-dir=notebooks

test: lint unit interpreter sm90a notebooks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests

interpreter: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/interpreter

sm90a: $(READY) $(SM90A)/.ready
	GPTOSS_SM90A_PYTHON=$(SM90A)/bin/python $(BIN)/python -m pytest tests/sm90a

notebooks: $(READY)
	mkdir -p $(REPORTS)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=120 -p no:timeout \
		--junitxml=$(REPORTS)/notebooks.xml notebooks
	$(BIN)/python -m tools.check_ran $(REPORTS)/notebooks.xml

$(READY): pyproject.toml constraints/$(STACK).txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint constraints/$(STACK).txt --editable ".[$(EXTRAS_$(STACK))]"
	touch $@

$(SM90A)/.ready: constraints/sm90a.txt
	test -x $(SM90A)/bin/python || $(PYTHON) -m venv $(SM90A)
	$(SM90A)/bin/python $(PIP) --requirement constraints/sm90a.txt
	touch $@

clean:
	rm -rf build $(VENV) $(SM90A)
