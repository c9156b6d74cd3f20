# Every target creates what it needs: `make demo` and `make test` work on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test faults lint types bench clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[openvino,efficientnet,federation,dev]'
	touch $@

demo: install
	$(BIN)/headstart demo

test: install
	$(BIN)/pytest

faults: install
	$(BIN)/pytest --no-cov -m minutes

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .coverage
