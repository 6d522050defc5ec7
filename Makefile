# Two commands do all their set-up themselves: make demo, make test. `make` alone lists the rest.

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The Python that makes .venv (3.11 or newer), the torch in it, and where pip takes torch from (empty: pip's own index).
PYTHON3 ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
# The demo's fault: compute, weight, optimizer, gradient, none.
FAULT ?= compute
# More words for the benchmarks: make bench BENCH_ARGS=--fresh
BENCH_ARGS ?=
# More words for pytest: make test PYTEST_ARGS='-k verdict -x'
PYTEST_ARGS ?=
# Processes that run tests side by side.
TEST_WORKERS ?= 2

PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.tools/bin:$(CURDIR)/.venv/bin:$(PATH)
export PYTHON3 TORCH_VERSION TORCH_INDEX
CODE := exporter remediation tests $(wildcard alert_rules demo dashboards benchmarks examples)

.PHONY: help setup bench setup-integrations campaign-alerts campaign-heal campaign-remediation campaign-kill campaign-api load-remediation mutants mutants-remediation demo dashboards-preview test test-integrations lint types imports unit format lock clean distclean


help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'

setup: ## make .venv and fetch prometheus and alertmanager (demo and test do this too)
	@setup/python.sh
	@setup/monitoring.sh

demo: setup ## a wrong bit in a real training run ends as a replaced node (FAULT=compute, weight, optimizer, gradient, none)
	@$(PYTHON) demo/main.py --fault $(FAULT)

dashboards-preview: setup ## draw every dashboard over the last demo's time range into dashboards/out/*.png
	@$(PYTHON) dashboards/preview.py --demo

test: lint types imports unit ## lint, types, import rules and core tests: under ten minutes on two cores

lint: setup ## ruff: rules and format
	@echo "[lint] ruff"
	@$(PYTHON) -m ruff check $(CODE)
	@$(PYTHON) -m ruff format --check $(CODE)

types: setup ## mypy --strict on both packages
	@echo "[types] mypy --strict"
	@$(PYTHON) -m mypy --strict

imports: setup ## who may import whom (import-linter)
	@echo "[imports] import-linter"
	@.venv/bin/lint-imports --no-logo

unit: setup
	@echo "[test] core tests, $(TEST_WORKERS) at a time"
	@$(PYTHON) -m pytest -n $(TEST_WORKERS) -m "not integration and not libraries" $(PYTEST_ARGS)

setup-integrations: setup
	@setup/integrations.sh

test-integrations: setup-integrations ## the heavier tests, marked `integration`: whole runs with every program
	@echo "[test] integration tests"
	@$(PYTHON) -m pytest -m integration -v $(PYTEST_ARGS)

test-libraries: setup ## the examples on transformers, Accelerate and Lightning, with a fault that is caught
	@setup/libraries.sh
	@echo "[test] examples on the real libraries"
	@.venv-libraries/bin/python -m pytest -m libraries -v tests/libraries $(PYTEST_ARGS)

mutants: setup ## break each verdict rule once, in a copy: does a test turn red?
	@$(PYTHON) tests/exporter/break_verdict_rules.py

campaign: setup ## thousands of injected faults and 100,000 clean comparisons on real ranks: docs/detection.md; goes on after a kill
	@PYTHONPATH=. $(PYTHON) -m benchmarks.campaign

campaign-heal: setup ## every fault and kill -9 x heal and halt: final weights of a clean run? (ten minutes; docs/healing.md; goes on after a kill)
	@PYTHONPATH=. $(PYTHON) -m benchmarks.heal --document

campaign-alerts: setup ## twenty jobs die 0.2 s after their event: does every page arrive, and in under 12 s?
	@$(PYTHON) tests/e2e/alert_path/campaign.py

bench: setup ## what it costs, side by side with its peers: benchmarks/out/bench.json, docs/performance.md (twenty-five minutes; goes on where it stopped)
	@test -d benchmarks/out/peers || $(PYTHON) -m pip install -q --no-deps --target benchmarks/out/peers sdcguard==0.4.0 \
		|| echo "[bench] sdcguard cannot be had: it is left out of the comparison"
	@PYTHONPATH=$(CURDIR):$(CURDIR)/benchmarks/out/peers $(PYTHON) -m benchmarks $(BENCH_ARGS)

mutants-remediation: setup ## break each guard of the service once, in a copy: does a random schedule turn red? (MUTANTS_ARGS='--only hold')
	@$(PYTHON) tests/remediation/break_guards.py $(MUTANTS_ARGS)

campaign-remediation: setup ## a thousand random schedules of the service: is anything replaced twice, or wrongly? (CAMPAIGN_ARGS='--seed 7'; goes on after a kill)
	@$(PYTHON) tests/remediation/campaign.py $(CAMPAIGN_ARGS)

campaign-kill: setup ## sixty runs of the real service with kill -9 while a node is replaced (ten minutes; goes on after a kill)
	@$(PYTHON) tests/remediation/kill_campaign.py $(CAMPAIGN_ARGS)

campaign-api: setup ## ten thousand hostile requests at every route of the service (CAMPAIGN_ARGS='--payloads 500')
	@$(PYTHON) tests/remediation/api_campaign.py $(CAMPAIGN_ARGS)

load-remediation: setup ## ten thousand deliveries to the service, fifty in flight: how long, and is one lost? (LOAD_ARGS=--document)
	@$(PYTHON) -m benchmarks.load $(LOAD_ARGS)

format: setup ## let ruff rewrite the code
	@$(PYTHON) -m ruff check --fix $(CODE)
	@$(PYTHON) -m ruff format $(CODE)

lock: setup ## write what .venv holds now into setup/constraints.txt
	@{ head -n 1 setup/constraints.txt; $(PYTHON) -m pip freeze --exclude-editable | grep -viE '^torch=='; } > .venv/constraints.new
	@mv .venv/constraints.new setup/constraints.txt

clean: ## remove what tests and the demo left behind
	rm -rf .cache demo/out dashboards/out benchmarks/out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

distclean: clean ## the same, and .venv and .tools: the next command sets up from nothing
	rm -rf .venv .venv-libraries .tools
