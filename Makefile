# Every target is one plain command away from what it runs; nothing is hidden here.
# Only Python 3.11+ and make are needed. `make` alone says what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_ENV := NO_COLOR=1 PYTHONDONTWRITEBYTECODE=
POLICIES := tests/unit/architecture tests/integration/architecture

GPUS := $(wildcard /dev/nvidia[0-9]*)
# Whose interpreters `make release` tries.
PYTHONS ?= $(PYTHON)
# The package index of torch, if another one than pip's.
TORCH_INDEX ?=

# Where `make s3` listens.
PORT ?= 4566

.PHONY: help setup torch demo check fix test fast docs gpu campaign s3 lock release sbom clean

help:
	@echo "make demo    train, evaluate and keep a tiny chat model: the whole pipeline, CPU, minutes"
	@echo "make setup   a .venv with everything, versions from constraints.txt; torch without CUDA if"
	@echo "             this machine has no GPU, or from TORCH_INDEX=URL"
	@echo "make check   format, lint, types, import contracts, policy tests, docs"
	@echo "make docs    the documentation as a site with search, in build/site"
	@echo "make test    all other tests but the campaigns"
	@echo "make fast    unit tests but the policy tests, without torch and Prefect: a minute"
	@echo "make gpu     the tests that need a GPU"
	@echo "make campaign   kills, power cuts, faults or attacks, a quarter of an hour: the group that was"
	@echo "             not run for longest, or CAMPAIGN=NAME; writes its row of docs/reliability.md"
	@echo "make s3      an S3-compatible server on this machine, to try object storage with"
	@echo "make fix     format, fix lint, regenerate docs/reference"
	@echo "make lock    write requirements.lock again: every version's hashes, from constraints.txt"
	@echo "make release  wheel and sdist in build/release, checked, installed and run; PYTHONS=\"python3.11"
	@echo "             python3.12\" tries several interpreters"
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
	@$(MAKE) --no-print-directory torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	@touch $(STAMP)

# Without a GPU torch's CPU build, which is gigabytes smaller: uv knows where it is. An index that pip
# or uv is configured with is used as it is, without --torch-backend, with which uv would use
# PyTorch's own index instead; and TORCH_INDEX=URL before all others.
OF_UV := UV_DEFAULT_INDEX UV_INDEX_URL UV_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS
SET_OF_UV := $(strip $(foreach name,$(OF_UV),$(if $($(name)),$(name))))
torch:
	@if [ -n "$(TORCH_INDEX)" ]; then \
		echo "torch from TORCH_INDEX"; \
		set -x; $(BIN)/pip install --quiet -c constraints.txt --index-url "$(TORCH_INDEX)" torch; \
	elif $(BIN)/pip config list | grep -Eq 'index-url|find-links|no-index'; then \
		echo "torch from the index that pip is configured with; TORCH_INDEX=URL names another"; \
		set -x; $(BIN)/pip install --quiet -c constraints.txt torch; \
	elif [ -n "$(SET_OF_UV)" ]; then \
		echo "torch from the index of $(SET_OF_UV); TORCH_INDEX=URL names another"; \
		set -x; $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt torch; \
	elif [ -n "$(GPUS)" ]; then \
		echo "torch with CUDA, for this machine's GPU; TORCH_INDEX=URL names another index"; \
		set -x; $(BIN)/pip install --quiet -c constraints.txt torch; \
	else \
		echo "torch without CUDA: this machine has no GPU; TORCH_INDEX=URL names another index"; \
		set -x; $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt \
			--torch-backend cpu torch; \
	fi

docs: setup
	$(BIN)/zensical build --strict

demo: setup
	$(BIN)/nanochat run tiny

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/zensical build --strict
	$(TEST_ENV) $(BIN)/pytest -q $(POLICIES)

fast: setup
	$(TEST_ENV) $(BIN)/pytest -q -n 2 $(POLICIES:%=--ignore=%) tests/unit

test: setup
	$(TEST_ENV) $(BIN)/pytest -q -n 4 -m "not gpu" $(POLICIES:%=--ignore=%) tests/integration tests/unit

gpu: setup
	$(TEST_ENV) $(BIN)/pytest -q -m gpu $$(cat tests/gpu.txt)

campaign: setup
	$(TEST_ENV) $(BIN)/python -m tests.campaigns $(if $(CAMPAIGN),"$(CAMPAIGN)")

s3: setup
	@$(BIN)/python -m tests.support.infra.storage.s3_server $(HOME)/.nanochat-flows/s3 $(PORT)

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
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-header --no-emit-index-url --constraint constraints.txt \
		--extra dev $(OF_TORCH:%=--no-emit-package %) \
		--output-file requirements.lock pyproject.toml

# A release as a user meets it: wheel and sdist, whose page is checked, and for each interpreter a
# clean environment with the wheel, in which the smallest pipeline runs.
release: setup
	rm -rf build/release
	$(BIN)/uv build --quiet --python $(BIN)/python --out-dir build/release
	$(BIN)/uv tool run twine check --strict build/release/*.whl build/release/*.tar.gz
	@for python in $(PYTHONS); do set -ex; \
		$$python -m venv build/release/$$python; \
		build/release/$$python/bin/pip install --quiet -c constraints.txt build/release/*.whl; \
		build/release/$$python/bin/pip check; \
		( cd build/release/$$python; \
		unset PREFECT_API_URL NANOCHAT_STORE PYTHONPATH; export NANOCHAT_HOME=$$PWD/home; \
		trap "bin/nanochat down" EXIT; \
		bin/nanochat run tiny --depth 1 ); \
	done
	ls -l build/release/*.whl build/release/*.tar.gz

sbom: setup
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/pip install --quiet cyclonedx-bom
	build/sbom-tool/bin/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file build/sbom.json requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
