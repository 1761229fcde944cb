# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3.11
BIN := .venv/bin
PACKAGES := cpkit cpkit_sqlite cpkit_postgres cpkit_redis cpkit_file conformance

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

demo: .venv/all ## Run an agent, kill it in the middle, and see it resume
	$(BIN)/python examples/agent.py $(ARGS)

test: .venv/dev ## Run the whole test suite against real stores
	$(BIN)/python -m pytest --numprocesses auto --dist loadscope $(ARGS)

lint: .venv/dev ## Check formatting, style, types and wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/core/plain_words.py
	$(BIN)/mypy
	$(BIN)/mypy examples/agent.py examples/demo examples/payments.py examples/custom_backend/cpkit_lmdb

docs: .venv/dev ## Build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

bench: .venv/dev ## Measure cpkit against its floors and its peers
	$(BIN)/python -m benchmarks $(ARGS)

format: .venv/dev ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment and every cache
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

# One environment with a stamp for each set of extras that is installed in it.
.venv/all .venv/dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(@F)]' --editable examples/custom_backend
	touch $@
