PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

.PHONY: demo test lint

# Trains routers on SmolLM2-135M with 1K-token documents and reports on held-out ones: about 12 minutes on 2 cores.
demo: .venv/installed
	$(BIN)/python -m experiments.fetch_assets
	$(BIN)/python -m experiments.train $(DEMO_TRAIN) --out=$(RUN)
	$(BIN)/python -m experiments.evaluate --suite=heldout $(DEMO_EVALUATE) --out=$(RUN)
	$(BIN)/python -m experiments.figures --out=$(RUN)

test: .venv/installed-dev
	$(BIN)/python -m experiments.fetch_assets
	$(BIN)/python -m pytest -n 2 -m "not gpu"

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
