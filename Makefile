# Every target sets itself up: a machine with Python 3.11 or later and make is enough.
# Nothing is installed outside .venv; no compiler is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE_STAMP := $(VENV)/.core
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint types unit quick durations nightly gpu bench bench-full benchmarks docs site pages wheel \
	wheel-build release-check suite-vision test-torch clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        train a language model under half of its peak, same bits, and print the proof"
	@echo "make test        lint, check types, run the tests and the code of README and docs"
	@echo "make nightly     all there is, long tests and situations too; hours, goes on; writes docs/nightly.md"
	@echo "make quick       core, planners and a handful of captured steps, in a minute"
	@echo "make setup       .venv with everything that the others need; some minutes the first time"
	@echo "make lint        one part of make test; make types and make unit are the others"
	@echo "make durations   the tests of make unit by the CPU seconds that they take; TESTS names some of them"
	@echo "make gpu         with a card: tests/gpu and benchmarks/gpu.py, most important first, in GPU_SECONDS=300; goes on"
	@echo "make bench       a sample of every benchmark against its targets and the committed results, in an hour; CPU"
	@echo "make bench-full  all cases that were not made with this version; days, can be cut off and goes on"
	@echo "make benchmarks  list the benchmarks and how to run one"
	@echo "make docs        the site of these pages with its gallery, build/site; without the gallery: make site"
	@echo "make wheel       build wheel and source archive, install the wheel by itself and run the demo from it;"
	@echo "                 without the demo: make wheel-build"
	@echo "make pages       write build/pages: every result with its tables and plots, and every argument of the API"
	@echo "make release-check  what a release must pass besides make nightly: every result made with its version, none stale"
	@echo "make suite-vision  benchmarks/public_suite.py on diffusers, torchvision and timm; hours, can be cut off and goes on"
	@echo "make test-torch  the canaries, the numerics tier and the demo on another torch: make test-torch TORCH=2.12.0"
	@echo "make clean       remove .venv and all caches"

setup: $(STAMP)

# Set-up runs again only when what it installs from has changed: what users install first, which is all that the demo
# needs, and what tests need on top of it.
$(CORE_STAMP): pyproject.toml constraints.txt
	@$(if $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),,$(error \
		ebbtide needs Python 3.11 or later, and $(PYTHON) is not; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $(CORE_STAMP)

$(STAMP): $(CORE_STAMP) published/pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" -e "./published[cp]"
	@touch $(STAMP)

demo: $(CORE_STAMP)
	$(BIN)/ebbtide demo

# The type checker keeps one core busy while the tests start.
test: lint
	@$(MAKE) --no-print-directory -j2 types unit

# Without ruff's cache, which holds imports for sorted that are not any more once a module has moved.
lint: $(STAMP)
	$(BIN)/ruff check --no-cache src tests benchmarks published conftest.py
	$(BIN)/ruff format --no-cache --check src tests benchmarks published conftest.py

types: $(STAMP)
	$(BIN)/pyright

# Each process has a run of files, so that what a file prepares is prepared once, and whoever is done takes from others.
WORKERS := --numprocesses=auto --maxprocesses=4 --dist=worksteal

unit: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not long"

CPU_SECONDS := build/cpu-seconds.jsonl

durations: $(STAMP)
	mkdir -p build && rm -f $(CPU_SECONDS)
	-PYTHONPATH=tests $(BIN)/python -m pytest $(WORKERS) -m "not long" -p cpu_seconds --cpu-seconds $(CPU_SECONDS) $(TESTS)
	$(BIN)/python tests/cpu_seconds.py $(CPU_SECONDS)

nightly: $(STAMP)
	$(BIN)/python tests/nightly.py $(NIGHTLY_OPTIONS)

# Paths, not a marker: what is not named here is not even imported.
QUICK := tests/core tests/planners published/tests tests/engine/test_quick_steps.py

quick: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=2 -m "not slow and not long" --hypothesis-profile=quick $(QUICK)

# GPU_PYTHON names an interpreter that has torch and the rest already: nothing is installed then.
GPU_PYTHON ?= $(BIN)/python
GPU_SECONDS ?= 300

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	$(GPU_PYTHON) tests/gpu/agenda.py --seconds $(GPU_SECONDS) $(GPU_OPTIONS)

# Both go on where they were cut off. GRAPHS names the folder of the published graphs, if it is there.
BENCH = PYTHONPATH=src:published/src:benchmarks $(BIN)/python -m harness.bench $(if $(GRAPHS),--graphs $(GRAPHS))

bench: $(STAMP)
	$(BENCH)

bench-full: $(STAMP)
	$(BENCH) --full

pages: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m publish
	PYTHONPATH=src $(BIN)/python tests/docs/api_page.py

release-check: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m publish --release

# The site: pages of docs as HTML, links and all, in an environment of its own; the gallery's plans are made in .venv.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

docs: site $(STAMP)
	PYTHONPATH=src $(BIN)/python docs/site/gallery.py build/site/gallery

site: $(DOCS_STAMP) pages
	$(DOCS_VENV)/bin/python -m sphinx --fail-on-warning --quiet --conf-dir docs/site . build/site
	@echo "build/site/index.html"

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt sphinx myst-parser furo
	@touch $(DOCS_STAMP)

# What a release is: built, unpacked, and run where nothing of this repository is. Only hatchling is downloaded.
WHEEL_VENV := .venv-wheel
WHEEL_STAMP := $(WHEEL_VENV)/.installed
WHEEL := $(BIN)/python tests/release/wheel.py $(abspath $(WHEEL_VENV)/bin/python)

wheel: $(WHEEL_STAMP) $(STAMP)
	$(WHEEL) --demo

wheel-build: $(WHEEL_STAMP) $(STAMP)
	$(WHEEL)

$(WHEEL_STAMP): constraints.txt
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet -c constraints.txt hatchling
	@touch $(WHEEL_STAMP)

benchmarks: $(STAMP)
	@$(foreach file,$(sort $(wildcard benchmarks/*.py)),echo "$(BIN)/python $(file)"; sed -n '1s/"""//gp' $(file) | sed 's/^/    /';) :

# By hand: what is not in .venv is installed beside it, into an environment that reads .venv's packages, torch among
# them, so that nothing is there twice. torchvision is the release that belongs to the pinned torch.
VISION_VENV := .venv-vision
VISION_PYTHON := $(VISION_VENV)/bin/python
PACKAGES := 'import site; print(site.getsitepackages()[0])'

suite-vision: $(STAMP)
	test -d $(VISION_VENV) || $(BIN)/python -m venv $(VISION_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PACKAGES))')" \
		> "$$($(VISION_PYTHON) -c $(PACKAGES))/project.pth"
	$(VISION_PYTHON) -m pip install --quiet --no-deps -r benchmarks/suite/requirements.txt
	$(VISION_PYTHON) benchmarks/public_suite.py --resume --only diffusion: torchvision: timm: $(SUITE_OPTIONS)

# By hand, once per release of torch: an environment of its own (some GB), results in benchmarks/results/torch-*.
# The pinned versions are taken where they fit that torch, any that fit it else.
TORCH ?=
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_PYTHON := $(TORCH_VENV)/bin/python

test-torch:
	@$(if $(TORCH),,$(error name a release of torch, for example: make test-torch TORCH=2.12.0))
	test -d $(TORCH_VENV) || $(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_PYTHON) -m pip install --quiet -c $(TORCH_VENV)/constraints.txt "torch==$(TORCH)" -e ".[dev]" -e ./published \
		|| $(TORCH_PYTHON) -m pip install --quiet "torch==$(TORCH)" -e ".[dev]" -e ./published
	$(TORCH_PYTHON) benchmarks/torch_versions.py

clean:
	rm -rf $(VENV) $(VISION_VENV) $(DOCS_VENV) $(WHEEL_VENV) .venv-torch-* .pytest_cache .ruff_cache .hypothesis build dist
	find src published tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
