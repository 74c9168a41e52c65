# Every command of the project. `make` alone lists them.

VENV := .venv
RUN := $(VENV)/bin/python
# The GPU tests run in the Python that has the CUDA build of SGLang, not in .venv.
GPU_PYTHON ?= python3

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help env browser demo test test-quick test-all test-gpu lint format clean

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

env: ## create .venv with everything that serving and testing on a CPU needs
	@tools/make-env.sh $(VENV)

browser: ## install a headless Chromium for the tests of the status page, where apt can
	@tools/install-browser.sh

demo: env ## serve the embedded model with two attention servers and one MLP server, and ask it something
	@$(RUN) -m sglang_afd.launch --attn 2 --mlp 1 --quiet --demo

lint: env ## check format, style, types and who imports whom
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: env ## format the code and fix what ruff can fix
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

test: env $(if $(CI),browser) ## run lint and the tests that need no GPU, but for the slow ones; failing lint does not hide the tests' results
	@$(MAKE) --no-print-directory lint; lint=$$?; $(RUN) -m pytest -m "not slow" && exit $$lint

test-quick: env ## run the unit and contract tests, and one fleet of real servers
	$(RUN) -m pytest -m "not slow" test/unit test/contract \
		"test/e2e/test_token_identity.py::test_qwen3_moe_is_token_identical[1]"

test-all: env ## run every test that needs no GPU, those of the benchmarks too
	$(RUN) -m pytest test/unit test/contract test/multiproc test/e2e test/bench

test-gpu: ## run the GPU tests, in GPU_PYTHON
	$(GPU_PYTHON) -m pytest -s -m "gpu and not slow" test/gpu
	$(GPU_PYTHON) -m pytest -m gpu test/contract

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
