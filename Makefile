# Every target is one plain command away from what it runs; nothing is hidden here.
# Only Python 3.11+ and make are needed. `make` alone says what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Threads of numerical libraries inside tests: tests run side by side.
TEST_ENV := OMP_NUM_THREADS=1 NO_COLOR=1

# Where `make s3` listens.
PORT ?= 4566

.PHONY: help setup demo check fix test fast slow s3 s3-docker lock sbom clean

help:
	@echo "make demo    train, evaluate and keep a tiny chat model: the whole pipeline, CPU, minutes"
	@echo "make setup   a .venv with everything, versions from constraints.txt"
	@echo "make check   format, lint, types, import contracts, fast tests, docs"
	@echo "make test    all tests but the slow campaigns"
	@echo "make fast    tests that need neither torch nor Prefect"
	@echo "make slow    the expensive campaigns (kill tests); hours on a laptop"
	@echo "make s3      an S3-compatible server on this machine, to try object storage with"
	@echo "make s3-docker   the same in docker"
	@echo "make fix     format, fix lint, regenerate docs/reference"
	@echo "make lock    write requirements.lock again: every version's hashes, from constraints.txt"
	@echo "make sbom    write build/sbom.json, a CycloneDX bill of materials of requirements.lock"
	@echo "make clean   remove the .venv and caches (artifacts stay where they are)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old"; \
		  echo "hint: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	@touch $(STAMP)

demo: setup
	$(BIN)/nanochat run tiny

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(TEST_ENV) $(BIN)/pytest -q tests/architecture

fast: setup
	$(TEST_ENV) $(BIN)/pytest -q -n 2 -m "not torch and not prefect and not slow and not gpu"

test: setup
	$(TEST_ENV) $(BIN)/pytest -q -n 2 -m "not slow and not gpu"

slow: setup
	$(TEST_ENV) $(BIN)/pytest -q -m slow

s3: setup
	@$(BIN)/python -m infra.containers.local_s3 --port $(PORT)

s3-docker: setup
	@$(BIN)/python -m infra.containers.local_s3 --port $(PORT) --docker

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/generate.py

# torch is not in it: its CPU and CUDA builds have one version and different files. So are the CUDA
# packages left out, which its CUDA build pins.
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti \
	nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand \
	nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink \
	nvidia-nvshmem-cu13 nvidia-nvtx

lock: setup
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-header --no-emit-index-url --constraint constraints.txt \
		--extra report --extra export --extra dev $(OF_TORCH:%=--no-emit-package %) \
		--output-file requirements.lock pyproject.toml

sbom: setup
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/pip install --quiet cyclonedx-bom
	build/sbom-tool/bin/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file build/sbom.json requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
