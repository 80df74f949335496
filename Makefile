# Every target makes its own environment when it needs one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := src tests examples benchmarks

.PHONY: help demo test lint format bench build docs

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,elastic,p2p,datasets,speech,track,vision]'
	@touch $@

demo: $(READY)  ## train a small model in six ways and compare them in one table (under 10 minutes on 2 cores)
	$(BIN)/isthmus demo

test: lint  ## format check, lint, types and tests
	$(BIN)/pytest -n 3 --dist loadfile

lint: $(READY)  ## format check, ruff, the floors of the house, types
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in the house's format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(READY)  ## measure; results go, dated, to benchmarks/results
	set -e; for part in codecs outer_loop sync_cost device models families learning pace mesh wan uneven churn chaos; do $(BIN)/python -m benchmarks.$$part; done

build: $(READY)  ## wheel and sdist, and the image where a Docker engine runs
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	@if docker info >/dev/null 2>&1; then docker build --tag isthmus .; \
	else echo "No Docker engine runs here: the image was not built."; fi

docs: $(READY)  ## the documentation as a website, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
