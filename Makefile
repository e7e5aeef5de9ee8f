# A fresh machine needs Python and make; everything else goes into .venv. `make test ARGS="-k shard"` passes ARGS on.
VENV := .venv
PYTHON ?= python3
ARGS ?=
# Processes that share the tests, by file: as many as there are cores, and one more for `make test`, some of whose tests wait for a sixth of
# their time. With PROCESSES=0 there is one alone, as a debugger needs it.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PROCESSES ?= $(CORES)
RETRY ?=
# A part of the test files: `make test SHARD=1/4`, for machines that share them
SHARD ?=
# A folder of the package: `make near FOLDER=data` takes its tests, and the test files that import from it
ROOM ?=
FOLDER ?= $(ROOM)
VALUES ?=
RUN := $(VENV)/bin/python
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# Images of Python set it, and each process then compiles all that it imports: 3.3 s for torch instead of 1.5 s
unexport PYTHONDONTWRITEBYTECODE
# The longest files come first, and none is shared: its tests use the same pools
SHARED = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST = $(RUN) -m pytest $(SHARED)

.PHONY: help demo quick near docs-test test durations check format bench golden docs package lowest gpu gpu-wheels pictures notebooks soak clean

help:
	@echo "make demo    run notebooks/quickstart.ipynb and print what its cells print"
	@echo "make quick   the tests that start no process: about half of them, in a minute"
	@echo "make near FOLDER=data  those with pools on this machine that concern a folder of the package"
	@echo "make docs-test  what the pages and the notebooks promise"
	@echo "make test    all tests"
	@echo "make check   ruff, formatting, mypy"
	@echo "make format  let ruff fix and format the code"
	@echo "make golden  write the texts that users see into tests/golden: review the difference (FOLDER=data: of a folder)"
	@echo "make bench   the figures, each as a ratio measured in this run"
	@echo "make docs    the site, into build/docs; warnings are errors"
	@echo "make package the wheel and the source, into dist; checked as PyPI checks them"
	@echo "make lowest  the quick and near tests with the oldest versions of what skymagic depends on: Colab's (FOLDER=data: of a folder)"
	@echo "make gpu     what only a GPU can show, on a machine that has one; docs/how-to/gpus.md"
	@echo "make gpu-wheels  a folder of wheels for such a machine that has no internet"
	@echo "make pictures  retake the pictures of the docs in JupyterLab (Chromium is needed)"
	@echo "make notebooks  run all notebooks, and keep what they show"
	@echo "make soak    random faults, and random changes of values, for minutes: nothing may break or grow"
	@echo "make clean   remove what make has made"

demo: $(DEMO)
	@$(RUN) notebooks/show.py notebooks/quickstart.ipynb --save build/quickstart.ipynb

quick: $(READY)
	@$(PYTEST) -m quick $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

near: $(READY)
	@$(PYTEST) -m near $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

# What the pages and the notebooks promise: in `make test`, and in neither `quick` nor `near`
docs-test: $(READY)
	@$(PYTEST) -m docs $(ARGS)

# pytest ends with 1 when all tests ran and some failed. With RETRY=1 these are run again, by themselves.
test: CORES := $(shell expr $(CORES) + 1)
test: $(READY)
	@$(PYTEST) $(if $(SHARD),--shard $(SHARD)) $(ARGS) || { \
	  [ $$? -eq 1 ] && [ -n "$(RETRY)" ] && echo "what failed beside other tests is run again by itself" && \
	  $(RUN) -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

# After a whole run: what each file takes, kept so that the longest run first and shards take as long as each other
durations: $(READY)
	@$(RUN) -m tests.durations

check: $(READY)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

format: $(READY)
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

golden: $(READY)
	@$(if $(FOLDER)$(ARGS),,rm -rf tests/golden/tests)
	@$(RUN) -m tests.surfaces
	@$(PYTEST) --write-golden -q $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)
	@git --no-pager diff --stat -- tests/golden

bench: $(READY)
	@$(RUN) benchmarks/run.py $(ARGS)

docs: $(READY)
	@$(RUN) -m pip install -q -e ".[docs]"
	@$(RUN) docs/generate.py
	@$(RUN) -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

package: $(READY)
	@rm -rf dist
	@$(RUN) -m build --outdir dist >build/package.log || { cat build/package.log; exit 1; }
	@$(RUN) -m twine check --strict dist/*

lowest: $(READY)
	@$(RUN) -m tests.lowest $(SHARED) $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

# Not in .venv: a machine with a GPU has a torch of its own, and perhaps no internet. WHEELS is a folder that gpu-wheels has filled.
WHEELS ?=
gpu:
	@WHEELS="$(WHEELS)" "$(PYTHON)" benchmarks/gpu.py $(ARGS)

# FOR is the Python of that machine: make gpu-wheels FOR=3.12 WHEELS=/tmp/wheels ARGS="accelerate lightning"
FOR ?=
gpu-wheels: $(READY)
	@$(RUN) benchmarks/gpu_wheels.py "$(or $(WHEELS),build/gpu-wheels)" $(if $(FOR),--python $(FOR)) $(ARGS)

pictures: $(READY)
	@mkdir -p docs/pictures
	@$(RUN) -m tests.pictures docs/pictures

notebooks: $(READY)
	@set -e; for one in notebooks/*.ipynb; do $(RUN) notebooks/show.py $$one --save $$one; done

soak: $(READY)
	@$(RUN) benchmarks/soak.py $(ARGS)
	@$(RUN) benchmarks/soak_values.py $(VALUES)
	@$(RUN) benchmarks/rented_leaks.py
	@SKYMAGIC_REPETITIONS=100 $(RUN) -m pytest --timeout=1200 tests/programs/test_under_load.py tests/pool/test_restart.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Both are made once, and brought up to date when what they were made from changes: what the demo needs, and all the rest beside it.
$(DEMO): pyproject.toml constraints.txt tests/environment.py
	@if ! "$(RUN)" -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "skymagic needs Python 3.11 or newer, and neither $(PYTHON) nor python3.13, python3.12, python3.11 is one." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	  fi; \
	  echo "making $(VENV) with $$found"; \
	  "$$found" -m venv --clear "$(VENV)" || { \
	    echo "$$found could not make an environment. On Debian and Ubuntu its package python3-venv is needed." >&2; exit 1; }; \
	fi
	@echo "installing skymagic with what the demo needs into $(VENV)"
	@"$(RUN)" -m tests.environment demo
	@touch "$@"

$(READY): $(DEMO)
	@echo "installing the tools and the frameworks that the tests need into $(VENV) (minutes the first time)"
	@"$(RUN)" -m tests.environment dev frameworks
	@"$(RUN)" -m pip install --quiet --no-deps --upgrade --target build/served jupyter-server-nbmodel jupyter-kernel-client || \
	  echo "without jupyter-server-nbmodel: tests of a server that executes cells by itself are skipped" >&2
	@"$(RUN)" -m tests.environment --target build/marimo marimo || echo "without marimo: its test is skipped" >&2
	@touch "$@"
