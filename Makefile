# Every target sets up .venv first, once; scripts/setup.sh has the how.
#   make PYTHON=python3.12 ...   picks the interpreter      make demo ARGS="--steps 2"   passes options on

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
ARGS ?=
PY := .venv/bin/python
# Jupyter refuses to run as root unless told (containers).
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
export PYTHON CHROMIUM

.PHONY: help setup lock demo lab test soak test-classroom test-mutants course-mutants test-browser test-lite lite test-book book site exercise exam slides test-zoo test-systems check format hooks exercises notebooks bench clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup:  ## build .venv, once (every other target does it by itself)
	@sh scripts/setup.sh

lock: setup  ## write pylock.toml: every package with its address and hash, for an install that repeats exactly
	@sh scripts/lock.sh $(ARGS)

demo: setup  ## train on 4 processes and watch the pipeline bubble
	@$(PY) -m mpkit demo $(ARGS)

lab: setup  ## open JupyterLab on the first notebook, 00-start-here
	@$(PY) -m jupyterlab $(AS_ROOT) notebooks/00-start-here.ipynb $(ARGS)

test: setup  ## every module, every strategy against serial training, every doctest; make test ARGS="-x tests/zero"
	@sh scripts/test.sh "not soak and not slow" $(ARGS)

soak: setup  ## everything, also what takes long, draws at random or compares measured times; SLICE=2/6 for a part
	@sh scripts/systems.sh || true
	@CHROMIUM=$$(sh scripts/chromium.sh || true) && export CHROMIUM && $(PY) -m scripts.gate.soak $(if $(SLICE),--slice $(SLICE)) $(ARGS)

test-classroom: setup  ## the exercises: solutions, stubs, wrong answers, notebooks, a class graded
	@sh scripts/test.sh "not soak" tests/classroom notebooks/exercises/solved $(ARGS)

exercise: setup  ## one exercise: its solution, its stub, each wrong answer; make exercise NAME=pass-the-token
	@test -n "$(NAME)" || { echo "make exercise NAME=pass-the-token"; exit 2; }
	@$(PY) -m pytest tests/classroom/test_exercises.py -k "$(NAME)" $(ARGS)

test-mutants: setup  ## the exercises' checks, by faulty solutions: at least 95 % have to be caught; some 20 minutes
	@$(PY) -m tests.classroom.mutants $(ARGS)

course-mutants: setup  ## the exercises' checks, by answers with another plan: at most 2 % may pass; some 20 minutes
	@$(PY) -m tests.classroom.plans $(ARGS)

test-browser: setup  ## the notebooks in a headless Chromium
	@CHROMIUM=$$(sh scripts/chromium.sh) && export CHROMIUM && $(PY) -m pytest tests/browser $(ARGS)

slides: setup  ## the tutorials as slides, into build/slides; ARGS=notebooks/03-zero.ipynb for one of them
	@$(PY) scripts/slides.py $(ARGS)

test-lite: setup  ## the browser edition: built, opened in a headless Chromium from a plain file server
	@sh scripts/lite.sh
	@CHROMIUM=$$(sh scripts/chromium.sh) && export CHROMIUM && $(PY) -m pytest tests/lite $(ARGS)

test-book: book  ## the book: built, then opened in a headless Chromium from a plain file server
	@CHROMIUM=$$(sh scripts/chromium.sh) && export CHROMIUM && $(PY) -m pytest tests/book scripts/book $(ARGS)

test-zoo: setup  ## some 60 architectures of transformers by each strategy, against plain PyTorch
	@$(PY) -m tests.zoo $(ARGS)

test-systems: setup  ## programs of other systems (DDP, FSDP, DeepSpeed, TensorFlow, ...) watched, against serial training
	@sh scripts/systems.sh || true
	@$(PY) -m tests.systems $(ARGS)
	@$(PY) -m tests.systems.accepted

check: setup  ## ruff, format, strict mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: setup  ## let ruff fix and format what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

hooks: setup  ## check before every commit from now on
	@$(PY) -m pre_commit install

exercises: setup  ## write the exercises' notebooks anew, from mpkit/course/exercises
	@$(PY) -m mpkit exercises notebooks/exercises

exam: setup  ## two wheels for an exam, in build/exam: mpkit without the exercises' solutions, and mpkit-solutions
	@$(PY) -m scripts.exam $(ARGS)

notebooks: setup  ## run the tutorials and store their outputs, with pictures for readers without a kernel
	@CHROMIUM=$$(sh scripts/chromium.sh) && export CHROMIUM && $(PY) scripts/store_outputs.py $(ARGS)

lite: setup  ## the browser edition as static files, in build/lite/site; PYODIDE=FOLDER for another Pyodide
	@sh scripts/lite.sh
	@$(PY) scripts/lite/build.py $(if $(PYODIDE),--pyodide "$(PYODIDE)") $(ARGS)

site: setup  ## pages that open from a file and need no kernel: explorer, twelve runs, gallery; in build/site
	@$(PY) -m scripts.site $(ARGS)

book: setup  ## tutorials, exercises, guides and API as one static site, in build/book
	@sh scripts/book.sh
	@$(PY) -m scripts.book

bench: setup  ## measure, print a table, write benchmarks/results.json
	@$(PY) -m benchmarks $(ARGS)

clean:  ## remove caches and build products; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/browser/screenshots
	@find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	@rm -rf .venv .venv.old.* .venv.lock
