# `make help` lists the targets. Everything runs inside .venv, which `make setup` builds and keeps fresh.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A folder of wheels beside the checkout (the CPU build of torch), used when it exists.
WHEELS ?= $(wildcard ../shared/wheels)
ifneq ($(WHEELS),)
TORCH := --find-links $(WHEELS) 'torch==2.13.0+cpu'
else
TORCH := 'torch>=2.13'
endif
EXTRAS := operator,worker,s3,dev

.PHONY: help setup test unit lint e2e bench cluster-up cluster-down clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## *' '{printf "  %-14s %s\n", $$1, $$2}'

setup: .venv.stamp  ## the virtual environment with everything the tests need

.venv.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

lint: setup  ## ruff, mypy strict, import rules
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
