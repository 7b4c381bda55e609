# Everything starts here: `make demo` and `make test` set up what they need by themselves, and say so meanwhile.
#
#   make demo PYTHON=python3.12      with another Python
#   make demo TORCH_INDEX=URL        with a further package index, for instance one that has CPU builds of torch

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
SET_UP = $(PYTHON) tools/set_up.py $(VENV) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

.PHONY: demo test tests-alone check format docs wheel torture clean

demo: $(CORE)  ## teach the bundled digits to three learners; about 2.5 minutes on two cores
	$(BIN)/tpl demo

test: $(DEV)  ## lint, types, architecture, tests, side by side; 7 to 20 minutes on two cores
	@$(MAKE) --no-print-directory -j2 check tests-alone

tests-alone: export PYTHONDONTWRITEBYTECODE =# the many programs that tests start need not compile the same modules
tests-alone: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)  ## the documentation as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html"

torture: $(DEV)  ## crashes, power cuts, hostile files and clients; 20 minutes, LONG=1 some hours, or HOURS=8
	$(BIN)/python -m torture $(if $(LONG),--long) $(if $(HOURS),--hours $(HOURS)) $(if $(SEED),--seed $(SEED))

wheel:  ## build the wheel in dist/ and try it in an empty environment outside the checkout; 4 minutes on two cores
	$(PYTHON) tools/try_wheel.py $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

$(CORE): pyproject.toml constraints.txt tools/set_up.py
	@$(SET_UP)
	@touch $(CORE)

$(DEV): $(CORE)
	@$(SET_UP) --extra dev
	@touch $(DEV)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache src/*.egg-info
