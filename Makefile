# Everything starts here: `make demo` and `make test` set up what they need by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format docs clean

demo: $(READY)  ## teach the bundled digits to three learners; about 2 minutes on two cores
	$(BIN)/tpl demo

test: $(READY) check  ## lint, types, architecture, tests; under 10 minutes on two cores
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the documentation as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html; with its search: $(BIN)/python -m http.server --directory site"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("tpl needs Python 3.11 or newer; run: make PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache src/*.egg-info
