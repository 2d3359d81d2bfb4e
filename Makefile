# make demo   train six methods side by side on the CPU and print the table
# make test   lint, then all tests
# make lint   ruff and mypy
# make test-verl  the verl adapter in an environment of its own (.venv-verl), through real Ray; docs/verl.md
# make test-verl-full   the same adapter when things break, and in verl's three trainer modes, on 1 and on 2 ranks; docs/verl.md
# make test-megatron  the Megatron engine in an environment of its own (.venv-megatron), Python 3.12; docs/verl.md
# make gap-example   a small language model in BF16 and in four bits on 100 everyday inquiries (docs/gap-example.md)
# make clean  remove the virtual environment and the caches; runs/ stays

PYTHON ?= python3
SEEDS ?= 0,1,2
MODES ?= fp32,bf16,naive,qat,trace,trace-all
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_STAMP := $(VERL_VENV)/.installed

PYTHON312 ?= python3.12
MEGATRON_VENV := .venv-megatron
MEGATRON_BIN := $(MEGATRON_VENV)/bin
MEGATRON_STAMP := $(MEGATRON_VENV)/.installed

.PHONY: demo gap-example test test-verl test-verl-full test-megatron lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	@started=$$(date +%s); \
	$(BIN)/tracefp4 compare recipes/demo.toml --modes $(MODES) --seeds $(SEEDS) --out runs/demo --overwrite; \
	code=$$?; echo "total: $$(( $$(date +%s) - started )) s"; exit $$code

gap-example: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r examples/gap_everyday/requirements.txt
	@$(BIN)/python examples/gap_everyday/run.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-verl: $(VERL_STAMP)
	VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=tracefp4.adapters.verl.plugin OMP_NUM_THREADS=1 \
	  $(VERL_BIN)/python -m pytest tests/adapters --ignore $(RAY_RUNS)
	$(VERL_BIN)/python recipes/verl/acceptance.py runs/test-verl --shapes sync:2

RAY_RUNS := tests/adapters/verl/test_ray_runs.py
STEPS ?= 20
SHAPES ?= all

test-verl-full: $(VERL_STAMP)
	VERL_PLATFORM=cpu OMP_NUM_THREADS=1 $(VERL_BIN)/python -m pytest $(RAY_RUNS)
	$(VERL_BIN)/python recipes/verl/acceptance.py runs/test-verl-full --modes trace --shapes $(SHAPES) --steps $(STEPS)

$(VERL_STAMP): recipes/verl/requirements.txt pyproject.toml
	@echo "installing into $(VERL_VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VERL_VENV)
	@$(VERL_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r recipes/verl/requirements.txt
	@$(VERL_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

test-megatron: $(MEGATRON_STAMP)
	VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=tracefp4.adapters.verl.plugin OMP_NUM_THREADS=1 \
	  $(MEGATRON_BIN)/python -m pytest tests/adapters/megatron tests/adapters/verl/test_megatron_engine.py

$(MEGATRON_STAMP): recipes/verl/requirements.txt recipes/verl/requirements-megatron.txt pyproject.toml
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "megatron-core 0.18 needs Python 3.12: name one with: make test-megatron PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@echo "installing into $(MEGATRON_VENV) (once; torch may bring its CUDA libraries, gigabytes)"
	@$(PYTHON312) -m venv $(MEGATRON_VENV)
	@$(MEGATRON_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r recipes/verl/requirements.txt
	@$(MEGATRON_BIN)/python -m pip install --quiet --disable-pip-version-check -r recipes/verl/requirements-megatron.txt
	@$(MEGATRON_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Installs once, and again only when the pins or the package's own metadata change. --no-build-isolation: the
# pinned setuptools builds the package, so nothing outside the lock is fetched.
$(STAMP): requirements-lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tracefp4 needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 || true);" \
	       "name another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-lock.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VERL_VENV) $(MEGATRON_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
