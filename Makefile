# Every target sets up .venv first, once; scripts/setup.sh has the how.
#   make PYTHON=python3.12 ...   picks the interpreter      make demo ARGS="--steps 2"   passes options on

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
ARGS ?=
PY := .venv/bin/python
# Jupyter refuses to run as root unless told (containers).
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
WITH_CHROMIUM := CHROMIUM=$$(sh scripts/chromium.sh) && export CHROMIUM &&
export PYTHON CHROMIUM

.PHONY: help setup lock demo lab test test-classroom test-browser soak check format exercises notebooks site book bench clean distclean

help:  # this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile

setup:  ## build .venv, once (every other target does it by itself)
	@sh scripts/setup.sh

demo: setup  ## train on 4 processes and watch the pipeline bubble
	@$(PY) -m mpkit demo $(ARGS)

lab: setup  ## open JupyterLab on the first notebook, 00-start-here
	@$(PY) -m jupyterlab $(AS_ROOT) --notebook-dir notebooks --LabApp.default_url /lab/tree/00-start-here.ipynb $(ARGS)

test: setup  ## every module, every strategy against serial training, every doctest; make test ARGS="-x tests/zero"
	@sh scripts/test.sh "not soak and not slow" $(ARGS)

test-classroom: setup  ## the exercises: solutions, stubs, wrong answers, a class graded; ARGS="-k pass-the-token"
	@sh scripts/test.sh "not soak" tests/classroom $(ARGS)

test-browser: setup  ## the notebooks in a headless Chromium
	@$(WITH_CHROMIUM) $(PY) -m pytest -m "not soak" tests/browser $(ARGS)

soak: setup  ## what is random or long: random plans, whole notebooks, other systems, other releases of torch
	@sh scripts/systems.sh || true
	@$(WITH_CHROMIUM) sh scripts/test.sh soak -p nbmake.pytest_plugin --nbmake --nbmake-timeout=300 tests mpkit examples notebooks tests/classroom tests/browser $(ARGS)
	@for each in tests.systems.accepted scripts.torch_versions; do $(PY) -m $$each || exit 1; done

check: setup  ## ruff, format, strict mypy, no conflict left
	@! git grep -nE '^(<{7}|>{7}) '
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: setup  ## let ruff fix and format what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

exercises: setup  ## write the exercises' notebooks anew, from mpkit/course/exercises
	@$(PY) -m mpkit exercises notebooks/exercises

notebooks: setup  ## run the tutorials and store their outputs, with pictures for readers without a kernel
	@$(WITH_CHROMIUM) $(PY) scripts/store_outputs.py $(ARGS)

site: setup  ## pages that open from a file and need no kernel: explorer, twelve runs, gallery; in build/site
	@$(PY) -m scripts.site $(ARGS)

book: setup  ## tutorials, exercises, guides and API as one static site, in build/book
	@sh scripts/book.sh
	@$(PY) -m scripts.book

bench: setup  ## measure, print a table, write benchmarks/results.json
	@$(PY) -m benchmarks $(ARGS)

lock: setup  # write pylock.toml: every package with its address and hash, for an install that repeats exactly
	@sh scripts/lock.sh $(ARGS)

clean:  # remove caches and build products; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/browser/screenshots
	@find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean  # remove .venv too
	@rm -rf .venv .venv.old.* .venv.lock
