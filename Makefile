# `make demo` and `make test` create what they need; nothing outside this folder but the missing system
# libraries (as root) is touched.
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
# Whole files to each of two processes: the tests of a file share programs and servers.
TWO := -n 2 --dist loadfile
STAMP := $(VENV)/.installed
# The environment of SGLang 0.5.23, for the group `lead`.
CURRENT := .venv-current
CURRENT_STAMP := $(CURRENT)/.installed

# Without a CUDA device everything runs on the CPU stand-in.
ifeq ($(wildcard /dev/nvidia[0-9]*),)
export PYTHONPATH := $(abspath test/srt/standin)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Each of a hundred processes would compile SGLang and torch again: 32 s to import them, 13 s without.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL: # servers and two cores do not share well
.PHONY: help env lint format test test-fast test-nightly test-current test-durations test-unit test-component test-e2e test-pythons check-patchset hazards chaos chaos-current bench-agentic demo serve wheel clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## / - /'

env: $(STAMP) ## create or update .venv

$(STAMP): pyproject.toml constraints.txt scripts/setup_env.sh python/sglang_disagg_patchset.pth
	scripts/setup_env.sh $(VENV)
	touch $@

$(CURRENT_STAMP): pyproject.toml constraints-current.txt scripts/setup_env.sh python/sglang_disagg_patchset.pth
	scripts/setup_env.sh $(CURRENT) constraints-current.txt cpu13,test
	touch $@

demo: env ## prefill + decode on this machine, without our flags, with the radix cache, with local turns; a table and a picture
	$(PY) -m benchmark demo

serve: env ## the same pair, left running for your own requests; WHOLE=1: with a shared store behind both servers
	$(PY) -m benchmark demo --serve $(if $(WHOLE),--whole)

test: lint check-patchset test-unit test-component test-e2e ## everything that CI runs

test-fast: env ## what needs neither torch nor SGLang, seconds: after every edit
	$(PYTEST) $(TWO) --fast -q -r fE test/srt/unit

test-nightly: env ## controls ("without it, it breaks") and fuzzers in their long form
	$(PYTEST) $(TWO) --nightly test/srt/unit test/srt/component
	$(PYTEST) --nightly test/srt/e2e

test-unit: env ## no engine, a minute or two
	$(PYTEST) $(TWO) test/srt/unit

test-component: env ## real trees, pools and transfers on the CPU
	$(PYTEST) $(TWO) test/srt/component

test-e2e: env ## real servers
	$(PYTEST) test/srt/e2e

test-current: $(CURRENT_STAMP) ## the group lead on SGLang 0.5.23, in an environment of its own
	$(CURRENT)/bin/python -m pytest $(TWO) test/srt/unit/lead test/srt/unit/patchset/test_current.py test/srt/current --ignore=test/srt/current/e2e
	$(CURRENT)/bin/python -m pytest test/srt/current/e2e

test-pythons: env ## attachment and what needs no torch, on each supported Python; not part of CI
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/test_pythons.sh $(PYTHONS)

chaos: env ## ten minutes of seeded faults on pairs and on the whole system; CHAOS="--seed 7 --backend nixl ..."
	PYTHONPATH=.:test/srt:$$PYTHONPATH $(PY) -m chaos $(CHAOS)

chaos-current: $(CURRENT_STAMP) ## the same on SGLang 0.5.23; CHAOS="--lead --seed 7", or with --stock
	PYTHONPATH=.:test/srt:$$PYTHONPATH $(CURRENT)/bin/python -m chaos $(or $(CHAOS),--lead)

bench-agentic: env ## is disaggregation worth it? one page; AGENTIC="--fleet fleet.yaml --trace FILE ..."
	$(PY) -m benchmark run worth $(AGENTIC)

test-durations: env ## how long each layer takes here; for CONTRIBUTING.md, on a machine that does nothing else
	@for layer in lint test-fast test-unit test-component test-e2e test-nightly; do \
		began=$$(date +%s); $(MAKE) --no-print-directory $$layer >/dev/null 2>&1; status=$$?; \
		echo "$$layer: $$(( $$(date +%s) - began )) s (status $$status)"; \
	done

hazards: env ## the hazards of docs/promises.md: which tests guard against what, from their markers
	$(PY) scripts/hazards.py

check-patchset: env ## import every replaced module and see each row of the table bound
	$(PY) -m sglang.srt.patchset --check

lint: env ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pre_commit validate-config

format: env ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: ## dist/*.whl, with uv or pip alone: without the environment, torch or SGLang
	@rm -rf dist
	@if uv --version >/dev/null 2>&1; then uv build --wheel --out-dir dist; \
	else python3 -m pip wheel --no-deps --wheel-dir dist .; fi

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) $(CURRENT) .venv-3.* dist build out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python test benchmark -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
