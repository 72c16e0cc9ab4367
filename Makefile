# Each target creates .venv if necessary; only python3, make and a C compiler are required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamp files in the environment: the demo's packages, and those of the tests and checks.
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
DEMO_EXTRAS := examples,plots
TEST_EXTRAS := $(DEMO_EXTRAS),docs,lightning,mmengine,mlflow,peft,remote,sweep,tensorboard,trackio,transformers,wandb,test
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
export PYTHONUNBUFFERED := 1

.PHONY: demo docs test test-all test-nightly test-pretend test-gpu test-torch test-vision test-lightning-versions check mutate parity \
	bench bench-peers format types-link clean

demo: $(DEMO_READY)
	$(BIN)/stepwrap train configs/digits_ddp.yaml --fresh

# `test` skips tests marked slow or nightly, `test-all` those marked nightly. Three processes keep two
# cores busy, because many tests wait for other processes. Files run in alphabetical order, which puts
# many short ones last, so that all processes end at about the same time. pytest-xdist may wait for
# ever after it has restarted a worker.
test test-torch: SELECTED := -m "not slow and not nightly"
test-all: SELECTED := -m "not nightly"
test test-all test-nightly: $(READY) types-link
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	PYTHONPATH=build/types $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(SELECTED)

# Run the tests marked `gpu` and `gpu2` on two pretend devices, which tests/pretend makes from host
# memory, and those marked `gpu4` on four. Runs of a part of the ordinary tests choose such a device, too.
ORDINARY := not gpu and not slow and not nightly
PRETEND = PYTHONPATH=$(CURDIR)/tests/pretend/site $(BIN)/python -m pytest -n 3 --dist loadfile \
	--no-loadscope-reorder --max-worker-restart=0
test-all: test-pretend
test-pretend: $(READY)
	$(BIN)/python tests/pretend/pretend_build.py
	PRETEND_CUDA=2 $(PRETEND) -m "(gpu or gpu2 or pretend) and not nightly"
	PRETEND_CUDA=4 $(PRETEND) -m gpu4
	PRETEND_CUDA=1 $(PRETEND) -m "$(ORDINARY)" tests/runner/test_runner_train_step.py tests/runner/test_runner_load_from.py
	PRETEND_CUDA=2 $(PRETEND) -m "$(ORDINARY)" tests/runner/test_runner_objects.py tests/runner/test_runner_eval_sets.py

# On a machine with GPUs: run everything that needs one in stages, and write a report with a verdict,
# build/gpu-check.txt. GPU_CHECK passes options such as "--only wrappers loops". The environment needs
# torch with CUDA: docs/install.md.
test-gpu: $(READY)
	$(BIN)/python tests/gpu_check.py $(GPU_CHECK)

# Run the tests of `test` with another release of torch in a fresh environment; `SELECTED=` adds the
# slow and nightly tests. Other versions are pinned, except setuptools, which some releases of torch limit.
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

# Run the tests of torchvision and timm, which need a matching pair of torch and torchvision, in a fresh
# environment below `build/vision`.
VISION_TORCH ?= 2.14.1
VISION ?= 0.29.1
VISION_ENV := build/vision
test-vision: INSTALL = $(VISION_ENV)/bin/python -m pip install -q --disable-pip-version-check \
	-c $(VISION_ENV)/constraints.txt
test-vision:
	$(PYTHON) -m venv --clear $(VISION_ENV)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(VISION_ENV)/constraints.txt
	$(INSTALL) pip
	$(INSTALL) torch==$(VISION_TORCH) torchvision==$(VISION) "setuptools>=70" wheel
	$(INSTALL) -e ".[examples,transformers,vision]" pytest pytest-timeout pytest-xdist hypothesis torchmetrics
	$(VISION_ENV)/bin/python -m pytest -o faulthandler_timeout=900 tests/wrappers/test_wrappers_vision.py

check: $(READY) types-link
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/packaging/page_modules.py
	$(BIN)/mypy
	PYTHONPATH=build/types $(BIN)/lint-imports --no-logo --no-cache

# Count how many of 50 changed operators in the core the quick tests catch; takes about an hour. MUTATE
# passes options such as "--only loops/data".
mutate: $(READY)
	$(BIN)/python tests/mutate.py $(MUTATE)

# Compare every wrapper with plain PyTorch and write docs/parity.md; takes up to forty minutes.
parity: $(READY)
	$(BIN)/python tests/wrappers/parity_report.py

# Run all benchmarks in under five minutes on two cores. BENCH=full measures long enough for published
# figures; BENCH_OPTIONS passes options such as "--only step_overhead" or "--device cuda".
BENCH ?= quick
PEERS := build/bench-peers
BENCH_PYTHON = $(if $(wildcard $(PEERS)/.ready),$(PEERS),$(VENV))/bin/python
bench: $(READY)
	$(BENCH_PYTHON) benchmarks/run.py $(if $(filter quick,$(BENCH)),--quick) $(BENCH_OPTIONS)

# Create a separate environment with the frameworks for comparison, which `make bench` then uses. One
# of them needs an older setuptools; all other versions are the same as for the tests.
bench-peers: INSTALL = $(PEERS)/bin/python -m pip install -q --disable-pip-version-check \
	-c $(PEERS)/constraints.txt
bench-peers:
	$(PYTHON) -m venv --clear $(PEERS)
	grep -v '^setuptools==' constraints.txt > $(PEERS)/constraints.txt
	$(INSTALL) pip
	$(INSTALL) torch
	$(INSTALL) -e ".[examples,plots,tensorboard]" -r benchmarks/peers.txt
	touch $(PEERS)/.ready

# Run the plugins' tests with the last release of each minor version of Lightning, and with `lightning`
# instead of `pytorch-lightning`, each in a fresh environment, for some minutes each. Only a few
# packages are pinned, because older releases of Lightning need older versions of the others.
LIGHTNING ?= pytorch-lightning==2.4.0 pytorch-lightning==2.5.6 pytorch-lightning==2.6.6 lightning==2.6.6
test-lightning-versions:
	@mkdir -p build/lightning
	@grep -E '^(torch|torchmetrics|scikit-learn|pytest)(-xdist)?==' constraints.txt > build/lightning/constraints.txt
	@set -e; for wanted in $(LIGHTNING); do \
		place=build/lightning/$$wanted; \
		install="$$place/bin/python -m pip install -q --disable-pip-version-check -c build/lightning/constraints.txt"; \
		rm -rf $$place; $(PYTHON) -m venv $$place; \
		$$install torch; $$install -e ".[examples]" pytest pytest-timeout pytest-xdist hypothesis "$$wanted"; \
		echo "$$wanted:"; $$place/bin/python -m pytest -q tests/plugins; \
	done

# Build the documentation site in build/site; a warning is an error. Open build/site/index.html.
docs: $(READY) types-link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Link each source folder into one namespace for mypy and import-linter.
types-link:
	@mkdir -p build/types/stepwrap
	@for folder in $(filter-out version,$(patsubst %/py.typed,%,$(wildcard */py.typed))); do \
		ln -sfn ../../../$$folder build/types/stepwrap/$$folder; done

# Install torch first, so that a dependency does not pull in another build than the CPU build.
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
