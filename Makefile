# Each target sets up .venv by itself; only python3, make and a C compiler are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamps in the one environment: what the demo needs is there, and what tests and checks need too.
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
DEMO_EXTRAS := examples,plots
TEST_EXTRAS := $(DEMO_EXTRAS),lightning,mmengine,tensorboard,test
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
export PYTHONUNBUFFERED := 1

.PHONY: demo test test-all test-torch test-lightning-versions check mutate parity bench bench-peers \
	format types-link clean

demo: $(DEMO_READY)
	$(BIN)/stepwrap train configs/digits_ddp.yaml --fresh

# `test` leaves out what is marked slow. Files in their order, the many short ones last: no long one
# is left to one process alone.
test test-torch: SELECTED := -m "not slow"
test test-all: $(READY) types-link
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	PYTHONPATH=build/types $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(SELECTED)

# The tests of `test` with another release of torch, in a fresh environment; slow tests too with
# `SELECTED=`. The other versions are pinned, except setuptools, which some releases of torch limit.
TORCH ?= 2.15.0
TORCH_ENV := build/torch/$(TORCH)
test-torch: INSTALL = $(TORCH_ENV)/bin/python -m pip install -q --disable-pip-version-check \
	-c $(TORCH_ENV)/constraints.txt
test-torch:
	$(PYTHON) -m venv --clear $(TORCH_ENV)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(INSTALL) pip
	$(INSTALL) torch==$(TORCH) "setuptools>=70" wheel
	$(INSTALL) -e ".[$(TEST_EXTRAS)]"
	$(TORCH_ENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(SELECTED)

check: $(READY) types-link
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=build/types $(BIN)/lint-imports --no-logo --no-cache

# How many of 50 changed operators in the core the quick tests find; about an hour. MUTATE passes options
# such as "--only loops/data".
mutate: $(READY)
	$(BIN)/python tests/mutate.py $(MUTATE)

# Every wrapper against plain PyTorch, into docs/parity.md; about ten minutes.
parity: $(READY)
	$(BIN)/python tests/wrappers/parity_report.py

# All benchmarks: under five minutes on two cores. BENCH=full measures long enough for figures that can
# be published; BENCH_OPTIONS passes more on, such as "--only step_overhead" or "--device cuda".
BENCH ?= quick
PEERS := build/bench-peers
BENCH_PYTHON = $(if $(wildcard $(PEERS)/.ready),$(PEERS),$(VENV))/bin/python
bench: $(READY)
	$(BENCH_PYTHON) benchmarks/run.py $(if $(filter quick,$(BENCH)),--quick) $(BENCH_OPTIONS)

# An environment of its own with the frameworks that we are compared with, which `make bench` then
# uses. One of them wants an older setuptools; all other versions are those of the tests.
bench-peers: INSTALL = $(PEERS)/bin/python -m pip install -q --disable-pip-version-check \
	-c $(PEERS)/constraints.txt
bench-peers:
	$(PYTHON) -m venv --clear $(PEERS)
	grep -v '^setuptools==' constraints.txt > $(PEERS)/constraints.txt
	$(INSTALL) pip
	$(INSTALL) torch
	$(INSTALL) -e ".[examples,plots,tensorboard]" -r benchmarks/peers.txt
	touch $(PEERS)/.ready

# The plugins' tests with the last release of each minor version of Lightning, and where `lightning`
# is installed in its place: each in a fresh environment, some minutes each. Only the versions that
# it must agree with are pinned: older releases want older packages than ours.
LIGHTNING ?= pytorch-lightning==2.4.0 pytorch-lightning==2.5.6 pytorch-lightning==2.6.6 lightning==2.6.6
test-lightning-versions:
	@mkdir -p build/lightning
	@grep -E '^(torch|torchmetrics|scikit-learn|pytest)(-xdist)?==' constraints.txt > build/lightning/constraints.txt
	@set -e; for wanted in $(LIGHTNING); do \
		place=build/lightning/$$wanted; \
		install="$$place/bin/python -m pip install -q --disable-pip-version-check -c build/lightning/constraints.txt"; \
		rm -rf $$place; $(PYTHON) -m venv $$place; \
		$$install torch; $$install -e ".[examples]" pytest pytest-xdist hypothesis "$$wanted"; \
		echo "$$wanted:"; $$place/bin/python -m pytest -q tests/plugins; \
	done

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# mypy and import-linter see the namespace through links, one per source folder.
types-link:
	@mkdir -p build/types/stepwrap
	@for folder in $(filter-out version,$(patsubst %/py.typed,%,$(wildcard */py.typed))); do \
		ln -sfn ../../../$$folder build/types/stepwrap/$$folder; done

# torch first: its CPU build must be there before a dependency asks for any build of it.
$(DEMO_READY): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	$(INSTALL) torch
	$(INSTALL) -e ".[$(DEMO_EXTRAS)]"
	touch $@

$(READY): $(DEMO_READY)
	$(INSTALL) setuptools wheel
	$(INSTALL) -e ".[$(TEST_EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
