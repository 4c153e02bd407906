# These commands do everything, set-up included:
#   make demo      trains dense, plain-STE and FST twins on embedded text and writes a report
#   make test      lint, types and the fast tests: each promise of the project is held by at least one of them
#   make pages     tables and pictures of the docs, from the committed records
#   make test-all  lint, types and all tests, those marked slow, of models and of the newest JAX too
#   make test-models  other people's models, from PyPI, in an environment of their own
#   make test-newest  the kernels' fast tests on the newest JAX
#   make test-oldest  the oldest versions that are promised: bind, the doors to Flax and the optimizer
#   make test-hf   a Hugging Face checkpoint there and back, against PyTorch and `transformers` in an environment of their own
#   make mutants   breaks one promise at a time and runs the fast tests that must notice
#   make faults    injects faults into runs, and writes what became of them to docs/faults.md
#   make soak      a run of 20,000 steps that is killed again and again; the result goes there too
# And `make docs` writes the site, documents and reference with a search, to site/index.html.

PYTHON ?= python3.12
VENV ?= .venv
# Compiling the kernels needs CUDA plug-ins, which JAX would complain of everywhere else.
KERNELS_VENV ?= .venv-kernels
# What the records were measured with; and the newest, with an environment of its own.
KERNELS_JAX ?= 0.11.2
NEWEST_VENV ?= .venv-jax12
NEWEST_JAX ?= 0.12.0.1
# None but the process itself, as the other tests run beside it.
KERNELS_WORKERS ?= 0
# PyTorch works in a process of its own, and may have another Python.
TORCH_VENV ?= .venv-torch
TORCH_VENV_PYTHON ?= python3.11
# Dozens of processes import JAX, the project and its tests: compiled once to bytecode, whatever the shell says, they take a
# third of the time.
export PYTHONDONTWRITEBYTECODE =
MODELS_VENV ?= .venv-models
# The oldest that pyproject.toml allows.
OLDEST_VENV ?= .venv-oldest
OLDEST = jax==0.11.2 jaxlib==0.11.2 flax==0.12.10 optax==0.2.6
# A worker that has no tests left takes some from the other.
PYTEST = -m pytest --dist worksteal -q

.PHONY: demo pages test test-all test-rest types fast slow fast-kernels slow-kernels test-models test-newest test-oldest test-hf mutants faults soak docs clean

demo: $(VENV)/ready
	$(VENV)/bin/python -m experiments

pages: $(VENV)/ready
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m experiments pages

test:
	$(MAKE) --jobs 2 $(VENV)/ready $(KERNELS_VENV)/ready
	$(VENV)/bin/ruff check .
	$(MAKE) --jobs 3 --output-sync types fast fast-kernels

test-all: test
	$(MAKE) test-rest

# Two at a time: the next begins when one ends, so that no processor waits for an environment, or for another lane's end.
# With TESTS_THIRD=0, 1 or 2 a third of each (conftest.py).
test-rest:
	$(MAKE) --jobs 2 --output-sync slow slow-kernels test-models test-newest

types: $(VENV)/ready
	$(VENV)/bin/pyright

# Half of compiling is optimizing, which most tests do without; the slow ones of layers and kernels compile as a user does
# (conftest.py). Three workers on two cores: where one waits for a process or a disk, the others go on. What the kernels'
# says is shown when they are done.
fast fast-kernels slow slow-kernels: export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
fast fast-kernels: SELECT = not slow
slow slow-kernels: SELECT = slow
fast slow: $(VENV)/ready
	+JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) -n 2 -m '$(SELECT)' --ignore tests/pallas_kernels \
	  --ignore tests/models tests sparse24_jax experiments
fast-kernels slow-kernels: $(KERNELS_VENV)/ready
	JAX_PLATFORMS=cpu $(KERNELS_VENV)/bin/python $(PYTEST) -n $(KERNELS_WORKERS) -m '$(SELECT)' tests/pallas_kernels pallas_kernels \
	  $(wildcard tests/sparse24_jax/*on_hopper_test.py)

test-models: $(MODELS_VENV)/ready
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(MODELS_VENV)/bin/python -m pytest -n 2 --dist worksteal -q tests/models

test-newest:
	$(MAKE) fast-kernels KERNELS_VENV=$(NEWEST_VENV) KERNELS_JAX=$(NEWEST_JAX) KERNELS_WORKERS=2

test-oldest: $(OLDEST_VENV)/ready
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(OLDEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -q \
	  -m 'not slow' $(addprefix tests/sparse24_jax/,binding integration optim)

test-hf: $(VENV)/ready $(TORCH_VENV)/ready
	JAX_PLATFORMS=cpu TORCH_PYTHON=$(TORCH_VENV)/bin/python $(VENV)/bin/python -m pytest -q tests/examples/finetune_hf_test.py

mutants: $(VENV)/ready
	$(VENV)/bin/python -m tests.mutants

faults: $(VENV)/ready
	$(VENV)/bin/python -m tests.faults --keep

soak: $(VENV)/ready
	$(VENV)/bin/python -m tests.soak --keep

docs: $(VENV)/ready
	JAX_PLATFORMS=cpu $(VENV)/bin/python docs/build.py

$(VENV)/ready: EXTRA = dev
# Else each of two workers compiles them all to bytecode.
$(VENV)/ready: IMPORTS = experiments.runs.train, flax.nnx, haiku, hypothesis, matplotlib.pyplot, orbax.checkpoint, scipy.stats
$(MODELS_VENV)/ready: EXTRA = models
$(OLDEST_VENV)/ready: EXTRA = test
$(OLDEST_VENV)/ready: PINNED = $(patsubst %,'%',$(OLDEST))
$(KERNELS_VENV)/ready: EXTRA = kernels-test
$(KERNELS_VENV)/ready: PINNED = $(patsubst %,'%==$(KERNELS_JAX)',jax jax-cuda13-pjrt jax-cuda13-plugin)

# In a quarter of pip's time; pip where uv does not find what pip is told of an index.
%/ready: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet uv
	$*/bin/uv pip install --quiet --python $*/bin/python --editable '.[$(EXTRA)]' $(PINNED) \
	  || $*/bin/python -m pip install --quiet --editable '.[$(EXTRA)]' $(PINNED)
	$(if $(IMPORTS),JAX_PLATFORMS=cpu $*/bin/python -c 'import $(IMPORTS)')
	touch $@

$(TORCH_VENV)/ready:
	$(TORCH_VENV_PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0
	touch $@

clean:
	rm -rf $(VENV) $(KERNELS_VENV) $(MODELS_VENV) $(NEWEST_VENV) $(OLDEST_VENV) $(TORCH_VENV) .jax_cache runs site
