# `make report` and `make test` do all the set-up they need; `make help` lists the rest.
# Written for GNU make 3.81 (macOS) and a plain POSIX sh.

PYTHON ?= python3
VENV := .venv

# An activated environment that has every package is used as it is; otherwise .venv is made. `-P` (Python 3.11) keeps
# workbench/ itself off the path, and refuses an older Python.
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
ifneq ($(ACTIVE),)
ifneq ($(abspath $(ACTIVE)),$(CURDIR)/$(VENV))
USABLE := $(shell "$(ACTIVE)/bin/python" -P workbench/requirements.py 2>/dev/null && echo yes)
endif
endif

ifeq ($(USABLE),yes)
RUN := "$(ACTIVE)/bin/python"
SETUP :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
SETUP := venv
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: picture help report test test-all lint lab doctor venv clean

help:
	@echo "make report [ARGS='...']   run the notebooks here and export them to HTML (ARGS: see workbench report --help)"
	@echo "make test   [ARGS='...']   lint, then run the tests of every day: minutes on two cores (ARGS go to pytest)"
	@echo "make test-all [ARGS='...'] the slow tests, too, and those that need a card where there is one"
	@echo "make lab                   open JupyterLab; notebooks are saved without their outputs"
	@echo "make doctor                say what works on this machine, and why not"
	@echo "make picture               draw the README's pictures from the committed records"
	@echo "make lint                  ruff over code and notebooks"
	@echo "make clean                 remove .venv, caches and this machine's reports; records are kept"
	@echo "Without an activated environment that has the packages, each first makes .venv by $(PYTHON) (PYTHON=...)."

picture: $(SETUP)
	@$(RUN) -c "from workbench.plots import speed; speed.picture('outputs/readme.png')"
	@$(RUN) -c "from workbench.plots import scaling; scaling.picture('outputs/cards.png')"

report: $(SETUP)
	@$(RUN) -m workbench report $(ARGS)

# Two processes with one thread each: the tests are many and small, and torch's threads would fight over the cores.
# Tests of one group (see tests/conftest.py) run in one process, in the order in which they were collected.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 20

test: lint
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: lint
	@-$(if $(SETUP),$(RUN) -m pip install --quiet -c constraints.txt -e '.[ray]')
	$(PYTEST) $(ARGS)

lint: $(SETUP)
	@$(RUN) -m ruff check .

lab: $(SETUP)
	@$(RUN) -m jupyter lab notebooks --ContentsManager.pre_save_hook=workbench.report.notebooks.without_results $(ARGS)

doctor: $(SETUP)
	@$(RUN) -m workbench doctor $(ARGS)

# .venv/complete holds what .venv was made from, and is written last: where it is missing, an install was interrupted and
# .venv is made anew; where it differs (a pin changed, the folder moved), pip brings .venv up to date.
venv:
	@{ pwd && cat pyproject.toml constraints.txt; } | cmp -s - $(VENV)/complete || $(MAKE) --no-print-directory build-venv

.PHONY: build-venv
build-venv:
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON): not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1), and Python 3.11 or newer is needed. Name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	@if test -f $(VENV)/complete && $(VENV)/bin/python -c '' 2>/dev/null; then \
	    echo "pyproject.toml or constraints.txt changed: bringing $(VENV) up to date"; \
	else \
	    echo "Making $(VENV): a few minutes, once"; "$(PYTHON)" -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/complete
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[interpreter]'
	@{ pwd && cat pyproject.toml constraints.txt; } >$(VENV)/complete

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis outputs/reports/quick outputs/reports/tiny
	find workbench tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
