# make run   execute the notebooks in order on the embedded nano checkpoint, into build/ (also as HTML)
# make test  every check: style, import rules, unit tests, kernels in the interpreter, kernels for sm_90a, notebooks, and
#            notebook 09 in a browser where Chromium is installed
# make lab   JupyterLab
# On an H200: make run STACK=h200 (Python 3.12; installs the GPU extras with the versions that were measured).

PYTHON ?= python3
STACK ?= cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(STACK)
H200_TRITON := .triton-h200
EXTRAS_cpu := lab,serve,dev
EXTRAS_h200 := lab,serve,gpu,dev
PIP := -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
# Plugins that every process would import for seconds and only `notebooks` needs, or none.
LEAN := -p no:nbval -p no:schemathesis
# Neighbouring tests share what they are slow to make, so each process begins with a part of its own.
SHARED := -n $(JOBS) --dist worksteal $(LEAN)
REPORTS := build/reports
# Begun first, so that no process is left with a long one at the end.
LONGEST := $(wildcard notebooks/06_*.ipynb notebooks/10_*.ipynb notebooks/05_*.ipynb)

.PHONY: run test lab lint unit interpreter sm90a notebooks browser clean

run: $(READY)
	$(BIN)/python -m tools.run_notebooks

lab: $(READY)
	$(BIN)/jupyter lab --notebook-dir=notebooks

test: lint unit interpreter sm90a notebooks browser

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARED) -m "not more_forms" --ignore=tests/browser tests

interpreter: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARED) tests/interpreter

sm90a: $(READY) $(H200_TRITON)/.ready
	PYTHONPATH=$(H200_TRITON) $(BIN)/python -c "import triton; print(\"kernels compiled by triton\", triton.__version__)"
	PYTHONPATH=$(H200_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARED) tests/gptoss_kernels -k "compile and not cuda"

notebooks: $(READY)
	mkdir -p $(REPORTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --nbval-lax \
		--nbval-current-env --nbval-cell-timeout=120 -p no:timeout --junitxml=$(REPORTS)/notebooks.xml \
		$(LONGEST) notebooks
	$(BIN)/python -m tools.check_ran $(REPORTS)/notebooks.xml

browser: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LEAN) tests/browser

$(READY): pyproject.toml constraints/$(STACK).txt constraints/reference.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint constraints/$(STACK).txt --editable ".[$(EXTRAS_$(STACK))]"
	$(BIN)/python $(PIP) --no-deps --ignore-requires-python --requirement constraints/reference.txt
	touch $@

# The Triton of the H200 environment, beside ours: put first on the path, it compiles the kernels as the H200 would.
$(H200_TRITON)/.ready: $(READY) constraints/sm90a.txt
	rm -rf $(H200_TRITON)
	$(BIN)/python $(PIP) --no-deps --target $(H200_TRITON) --requirement constraints/sm90a.txt
	touch $@

clean:
	rm -rf build $(VENV) $(H200_TRITON)
