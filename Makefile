.PHONY: check format lint types test slow parity

PYTHON ?= python

check: lint types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

test:
	$(PYTHON) -m pytest -q

slow:
	$(PYTHON) -m pytest -q -m slow

parity:
	$(PYTHON) -m pytest -q tests -k parity
