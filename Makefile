# A fresh machine needs Python and make; everything else goes into .venv. `make test ARGS="-k shard"` passes ARGS on.
VENV := .venv
PYTHON ?= python3
ARGS ?=
# Processes that share the tests, by file: `make test PROCESSES=2`. With 0 there is one alone, as a debugger needs it.
PROCESSES ?= 0
RETRY ?=
VALUES ?=
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo test check format bench gpu gpu-wheels pictures notebooks soak clean

help:
	@echo "make demo    run notebooks/quickstart.ipynb and print what its cells print"
	@echo "make test    all tests"
	@echo "make check   ruff, formatting, mypy"
	@echo "make format  let ruff mend and format the code"
	@echo "make bench   the figures, each as a ratio measured in this run"
	@echo "make gpu     what only a GPU can show, on a machine that has one; docs/gpus.md"
	@echo "make gpu-wheels  a folder of wheels for such a machine that has no internet"
	@echo "make pictures  take the README's pictures anew, in JupyterLab (Chromium is needed)"
	@echo "make notebooks  run all notebooks, and keep what they show"
	@echo "make soak    random faults, and random changes of values, for minutes: nothing may break or grow"
	@echo "make clean   remove what make has made"

demo: $(READY)
	@$(RUN) notebooks/show.py notebooks/quickstart.ipynb --save build/quickstart.ipynb

# pytest ends with 1 when all tests ran and some failed. With RETRY=1 these are run again, by themselves.
test: $(READY)
	@$(RUN) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS) || { \
	  [ $$? -eq 1 ] && [ -n "$(RETRY)" ] && echo "what failed beside other tests is run again by itself" && \
	  $(RUN) -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

check: $(READY)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

format: $(READY)
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

bench: $(READY)
	@$(RUN) benchmarks/run.py $(ARGS)

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
	@SKYMAGIC_PICTURES=docs/pictures $(RUN) -m pytest -q tests/display/test_browser.py

notebooks: $(READY)
	@set -e; for one in notebooks/*.ipynb; do $(RUN) notebooks/show.py $$one --save $$one; done

soak: $(READY)
	@$(RUN) benchmarks/soak.py $(ARGS)
	@$(RUN) benchmarks/soak_values.py $(VALUES)
	@$(RUN) benchmarks/rented_leaks.py
	@SKYMAGIC_REPETITIONS=100 $(RUN) -m pytest --timeout=1200 tests/programs/test_under_load.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made once, and brought up to date when what it was made from changes.
$(READY): pyproject.toml constraints.txt
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
	@echo "installing skymagic with its tools and the frameworks into $(VENV) (minutes the first time)"
	@"$(RUN)" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frameworks]"
	@touch "$@"
