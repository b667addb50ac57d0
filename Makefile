PYTHON ?= python3
KERNEL_PYTHON ?= python3.12
BIN := .venv/bin
RUN := runs/demo
KERNEL_TESTS := $(addprefix tests/test_,$(addsuffix .py,kernels_mosaic kernels_triton kernels_triton_lowering kernels_jax_triton kernels_api \
	xattn_kernels xattention visits attention decode_attention))

.PHONY: demo test test-kernels lint

# Trains routers on SmolLM2-135M with documents of about 500 tokens and reports on held-out ones; README.md says what differs from the paper's run.
demo: .venv/installed
	$(BIN)/python -m experiments.fetch_assets
	$(BIN)/python -m experiments.train --pack_tokens=512 --min_tokens=384 --max_documents=1 --block_size=32 --sink_tokens=32 --local_tokens=64 \
		--steps=50 --global_batch=2 --corpus_rows=20 --router_lr=5e-3 --multiplier_lr=2e-2 --warmup=0.1 --checkpoint_every=10 --out=$(RUN)
	$(BIN)/python -m experiments.evaluate --suite=heldout --rows=6 --random_seeds=2 --batch_size=2 --out=$(RUN)

test: .venv/installed-dev
	$(BIN)/python -m experiments.fetch_assets
	$(BIN)/python -m pytest -n 2 -m "not gpu"

# What the kernels rest on, with the JAX of a GPU machine: lowering, resources and interpreted runs of the kernels, their tables and entry,
# and the attention that calls them. A GPU is not needed.
test-kernels: .venv-kernels/installed
	.venv-kernels/bin/python -m pytest -n 2 -m "not gpu" $(KERNEL_TESTS)

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

.venv-kernels/installed: requirements.txt requirements-kernels.txt
	$(KERNEL_PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-kernels.txt
	touch $@
