# `make help` lists the targets. Everything runs inside .venv, which `make setup` builds and keeps fresh.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A folder of wheels beside the checkout (the CPU build of torch), used when it exists.
WHEELS ?= $(wildcard ../shared/wheels)
# On a terminal uv shows what it downloads.
QUIET := $(shell [ -t 2 ] || echo -q)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
INSTALL := $(BIN)/uv pip install $(QUIET) --python $(BIN)/python
ifneq ($(WHEELS),)
TORCH := --find-links $(WHEELS) 'torch==2.13.0+cpu'
INSTALL_TORCH := $(INSTALL) $(TORCH)
else
TORCH := 'torch>=2.13,<2.14'
# The build for the GPU that is here, or that for processors, which has a tenth of the size. Its index may be out of
# reach: then the usual one.
INSTALL_TORCH := { $(INSTALL) --torch-backend=auto $(TORCH) || $(INSTALL) $(TORCH); }
endif
DEMO ?= .everstep/demo
DEMO_STEPS ?= 700
# The distributions, from this checkout. uv and pip both take the one here for what another one of them needs.
OURS := -e './worker[worker,s3,gcs,azure]' -e './operator[kubeconfig,otel]' -e ./local -e ./horovod -e ./sources
# Where a file *.pth names folders in which every process of the environment finds modules: those that tests share.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

# The files that are committed are sources: what a tool makes is named in .gitignore.
GENERATED := '*.stamp' '*.log' '*.pyc'
# Tests start hundreds of processes. Where this is set, each of them compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo setup lock generate version release docs check test nightly durations unit lane-unit lint techniques \
  e2e soak bench clean-root cluster-up cluster-down clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## *' '{printf "  %-14s %s\n", $$1, $$2}'

demo: setup  ## train here with three workers, kill one, scale to four; no cluster, no GPU, no Docker
	@$(BIN)/everstep demo --out $(DEMO) --steps $(DEMO_STEPS)

setup: $(VENV)/.stamp  ## the virtual environment with everything the tests need

# uv installs in a fifth of the time; where it cannot reach the packages, pip may.
INSTALL_ALL = $(INSTALL_TORCH) && $(INSTALL) $(OURS) --group dev --group release || \
  ( $(PIP) -U 'pip>=25.1' && $(PIP) $(TORCH) && $(PIP) $(OURS) --group dev --group release )
$(VENV)/.stamp: pyproject.toml worker/pyproject.toml operator/pyproject.toml local/pyproject.toml \
  horovod/pyproject.toml sources/pyproject.toml
	@echo 'installing PyTorch and all else into $(VENV): minutes the first time, seconds later'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv
	@$(INSTALL_ALL)
	@printf '%s\n' '$(CURDIR)/tests' '$(CURDIR)/tests/cluster' '$(CURDIR)/tools' > "$$($(BIN)/python -c '$(SITE)')/everstep_tests.pth"
	@touch $@

# Without torch, whose builds differ by the kind of GPU. No index is named: whoever installs from these has one.
LOCK := UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 \
  --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-package everstep --no-emit-package everstep-operator

lock: setup  ## renew requirements/: exact versions and hashes of what the images, local mode and a release install
	$(LOCK) worker/pyproject.toml operator/pyproject.toml --extra otel -o requirements/operator.txt
	$(LOCK) worker/pyproject.toml --extra worker --extra s3 --overrides <(echo "torch; python_version < '3'") \
	  -o requirements/worker.txt
	$(LOCK) worker/pyproject.toml operator/pyproject.toml local/pyproject.toml --extra kubeconfig -o requirements/local.txt
	$(LOCK) <($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("worker/pyproject.toml", "rb"))["build-system"]["requires"])') \
	  -o requirements/build.txt

generate: setup  ## from the code: the CRD, install.yaml, and tables of reference pages (commands, metrics, variables, values)
	@$(BIN)/python tools/documents/generate.py
	@$(BIN)/python -m release.manifests

$(VENV)/.docs.stamp: $(VENV)/.stamp
	@$(INSTALL) --group docs || ( $(PIP) -U 'pip>=25.1' && $(PIP) --group docs )
	@touch $@

docs: $(VENV)/.docs.stamp  ## the documents as a site: .everstep/site/html; DOCS_VERSION=1.2 puts it beside others
	@$(BIN)/python tools/documents/build_site.py $(if $(DOCS_VERSION),--version $(DOCS_VERSION))

version: setup  ## VERSION=0.2.0: write it into all that has the version, the changelog too
	@$(BIN)/python -m release.bump '$(VERSION)'

# docs/operations/releasing.md
release: setup  ## VERSION=0.2.0: wheels, chart, manifests, SBOMs, notes and their sums in dist/0.2.0, from a clean commit
	@$(BIN)/python -m release '$(VERSION)' --torch="$(TORCH)" $(if $(WITHOUT_RESULTS),--without-results)

lint: setup  ## ruff, mypy strict, import rules, no generated file in the repository
	@made="$$(git ls-files -- $(GENERATED))"; if [ -n "$$made" ]; then \
	  echo "generated, and in the repository: $$made"; echo 'git rm --cached them, and name them in .gitignore'; exit 1; fi
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks:benchmarks/hostile_parts:benchmarks/recovery_parts:benchmarks/rendezvous_parts \
	  $(BIN)/mypy benchmarks/*.py
	$(BIN)/lint-imports

unit: setup  ## tests that need no server
	$(BIN)/pytest -n 2 --dist loadfile -m "not s3 and not apiserver and not kind and not long" tests/unit tests/worker tests/model tests/data \
	  tests/checkpoint tests/storage tests/train tests/recovery tests/adapters tests/compat tests/conformance tests/local tests/run

techniques: setup  ## docs/techniques.md from the recipes and the figures that their tests measured last
	$(BIN)/python tests/support/recipes/techniques.py

LANES := unit ordinary recipes servers nodes alone
NIGHTLY := long long-nodes long-alone

# tests/lanes/lanes.py says which tests are in which lane. A test that fails in its lane is repeated once, alone; the end
# of the output lists those that needed it. Nothing is skipped silently: -ra prints each skip with its reason. `--lint`
# builds the site of the documents, too.
test: setup  ## lint, and each mechanism: unit, model, worker, API server, S3, and a real cluster with nodes
	$(BIN)/python tests/lanes/lanes.py --lint $(LANES)

nightly: setup  ## every test there is, on one commit: results.json has outcomes and seconds. Begun again, it goes on
	$(BIN)/python tests/lanes/lanes.py --lint --whole --go-on --results results.json $(LANES) $(NIGHTLY)

durations: setup  ## play the lanes, and keep each test's seconds: by them the longest begin first
	$(BIN)/python tests/lanes/lanes.py --record $(LANES)

check: setup  ## what one runs while working: lint beside unit tests, and a local run with a kill, in three minutes
	@$(MAKE) -s -j 2 lint lane-unit
	@$(MAKE) -s demo DEMO=.everstep/check DEMO_STEPS=500

lane-unit: setup
	@$(BIN)/python tests/lanes/lanes.py unit

e2e: setup  ## the scenarios on a real cluster with nodes
	$(BIN)/pytest tests/e2e

soak: setup  ## what takes long: a hundred local runs with kills at random moments, the demo in a fresh clone, and more
	EVERSTEP_RUNS=100 $(BIN)/pytest -n 3 tests/run/test_run_robust.py -k random_moment
	EVERSTEP_KILLS=200 $(BIN)/pytest tests/recovery/test_recovery_kills.py -k random_moments
	EVERSTEP_KILLS=50 $(BIN)/pytest tests/agent/test_agent_jobs.py -k random_moments
	EVERSTEP_REPLAYS=1000 $(BIN)/pytest tests/recovery/test_rollback_machine.py
	EVERSTEP_FORKS=20000 $(BIN)/pytest tests/agent/test_agent_processes.py
	EVERSTEP_SEEDS=0:50 $(BIN)/pytest -n 2 tests/run/test_run_sequences.py
	EVERSTEP_SEEDS=0:50 $(BIN)/pytest tests/e2e/test_sequences.py
	$(BIN)/pytest -m long
	$(BIN)/pytest -s tests/soak

bench: setup  ## every benchmark, briefly
	@for script in $(filter-out benchmarks/figures.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script --quick || exit 1; done

clean-root: setup  ## set-up and tests on a Debian with what the README names and nothing else: run it when set-up changes
	$(BIN)/python tests/lanes/clean_root.py

cluster-up: ## the test cluster: kind with a control plane and two workers (see tests/cluster/README.md)
	$(PYTHON) tests/cluster/cluster.py up

cluster-down: ## take the test cluster down
	$(PYTHON) tests/cluster/cluster.py down

clean:  ## remove what make made inside the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
