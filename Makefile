# The two commands: `make train` and `make test`. Needed first: Python 3.11, make.
#
#   make train     train the language model of params/lm into runs/lm.Tiny
#   make test      the checks of `make lint`, the tests of every change
#   make test-all  the same, and those with the mark nightly
#   make test-keras KERAS=3.14.1           tests of private API with another Keras
#   make test-tensorflow TENSORFLOW=2.20.0 the same with another TensorFlow
#   make lint      format check, lint, types, the words of docstrings
#   make format    rewrite the code in the project's format
#   make site      the documentation as a site, in build/site
#   make guide     rebuild the notebook after editing docs/tutorial/guide.py
#   make pictures  the pictures of docs/
#   make bench     measure steps beside torch, JAX and plain Keras
#   make regression  overhead of short steps and retraces, beside the last result
#   make accelerator-check  what holds on the GPUs of this machine, as a report
#   make measure   speed, schedules, profile, start-up, memory, cuts, plans, retraces
#   make clean     remove caches and builds (not the environment, not the runs)
#
# VENV=DIR puts the environment elsewhere, PYTHON=... chooses the interpreter,
# PARAMS=lm.Small another experiment.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PARAMS ?= lm.Tiny
LOGDIR ?= runs/$(PARAMS)
# One more than there are cores: some tests wait for other processes.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Parts of the nightly tests, one after another: a process does not grow without end.
SLICE ?= 1/6 2/6 3/6 4/6 5/6 6/6

BIN := $(VENV)/bin
TRAINER_INSTALLED := $(VENV)/.installed-trainer
DEV_INSTALLED := $(VENV)/.installed-dev

.PHONY: help train test test-all test-nightly test-keras test-tensorflow lint format site guide pictures bench regression accelerator-check measure clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

train: $(TRAINER_INSTALLED)
	$(BIN)/python -m trainer --params=$(PARAMS) --logdir=$(LOGDIR)

# Files go to workers, so that what a file makes once is made once.
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS)

# Two parts, one after another: a process keeps much of what TensorFlow has traced.
FIRST := $(addprefix tests/,models distribution runtime stage tensor_parallel)

test: lint
	$(PYTEST) --dist=worksteal -m "pure and not nightly"
	$(PYTEST) --dist=loadfile -m "not pure and not nightly" $(FIRST)
	$(PYTEST) --dist=loadfile -m "not pure and not nightly" $(addprefix --ignore=,$(FIRST))

test-nightly: $(DEV_INSTALLED)
	set -e; for slice in $(SLICE); do \
		$(PYTEST) --dist=worksteal -m nightly --slice=$$slice; \
	done

test-all: test test-nightly

# The oldest of setup.py's ranges. The newest are what `make test` installs.
KERAS ?= 3.14.1
TENSORFLOW ?= 2.20.0
# What depends on private names. Without tests/_compat/test_upstream.py, which says when
# a workaround is no longer needed: that is a matter of the newest versions.
VERSION_TESTS ?= tests/_compat/keras_internals tests/_compat/test_tf_internals.py \
	tests/_compat/test_tflite.py tests/_compat/test_functions.py \
	tests/report/test_summary.py tests/capture/test_tracer.py tests/graph \
	tests/models/test_identity.py tests/models/test_gradient_identity.py \
	tests/models/test_mixed_precision.py tests/models/test_pipelined_layer.py \
	tests/models/test_pipelined_model.py tests/models/test_pipelined_losses.py \
	tests/models/test_pipelined_placement.py tests/models/test_saved_models.py \
	tests/distribution/test_placement.py \
	tests/quantization/test_export.py tests/quantization/test_tfmot.py

test-keras: OTHER := keras==$(KERAS)
# tensorflow-model-optimization needs tf-keras, a release of which needs one TensorFlow.
test-tensorflow: OTHER := tensorflow==$(TENSORFLOW) tf-keras~=$(basename $(TENSORFLOW)).0

# In a folder that comes first on the path, before those of $(VENV).
OTHER_FOLDER = $(CURDIR)/build/$(subst ==,-,$(firstword $(OTHER)))

test-keras test-tensorflow: $(DEV_INSTALLED)
	test -f $(OTHER_FOLDER)/.installed || $(BIN)/python -m pip install --quiet --no-deps \
		--upgrade --target $(OTHER_FOLDER) $(OTHER)
	touch $(OTHER_FOLDER)/.installed
	PYTHONPATH=$(OTHER_FOLDER) $(BIN)/python -c 'import keras, tensorflow; \
		name, _, expected = "$(firstword $(OTHER))".partition("=="); \
		found = globals()[name].__version__; assert found == expected, found'
	PYTHONPATH=$(OTHER_FOLDER) $(PYTEST) --dist=loadfile $(VERSION_TESTS)

lint: $(DEV_INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m docs.lint

format: $(DEV_INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

site: $(DEV_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html"

guide: $(DEV_INSTALLED)
	$(BIN)/python docs/render.py

bench: $(TRAINER_INSTALLED)
	$(BIN)/python -m benchmarks

regression: $(DEV_INSTALLED)
	$(BIN)/python -m benchmarks.regression

# It compares with what the tests' helpers compute.
accelerator-check: $(DEV_INSTALLED)
	$(BIN)/python -m tests.accelerator_check

measure: $(TRAINER_INSTALLED)
	$(BIN)/python -m benchmarks.pipeline --workload=mlp
	$(BIN)/python -m benchmarks.pipeline --workload=transformer
	$(BIN)/python -m benchmarks.schedules --workload=mlp
	$(BIN)/python -m benchmarks.schedules --workload=transformer
	$(BIN)/python -m benchmarks.profile --workload=mlp
	$(BIN)/python -m benchmarks.profile --workload=transformer
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.studies.partition
	$(BIN)/python -m benchmarks.retraces
	$(BIN)/python -m benchmarks.studies.transfer
	$(BIN)/python -m benchmarks.studies.planner

pictures: $(DEV_INSTALLED)
	$(BIN)/python -m docs.pictures

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find tfgpipe params trainer tests benchmarks docs examples -name __pycache__ -prune \
		-exec rm -rf {} +

# Without build isolation an environment that already holds every requirement
# installs with no network at all.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'setuptools>=64' wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$(1)]'
endef

$(TRAINER_INSTALLED): setup.py
	$(call install,trainer)
	touch $@

$(DEV_INSTALLED): setup.py
	$(call install,trainer$(comma)dev)
	touch $@ $(TRAINER_INSTALLED)

comma := ,
