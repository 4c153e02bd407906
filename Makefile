# Two commands do everything, set-up included:
#   make demo    trains dense, plain-STE and FST twins on embedded text and writes a report (about four minutes)
#   make test    lint, types and the whole test suite

PYTHON ?= python3.12
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test setup clean

demo: setup
	$(RUN) -m experiments

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal -q

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
