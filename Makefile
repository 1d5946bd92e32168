# make run: the digits example from training to a served model. make test: every check and test. make clean: undo both.

PYTHON ?= python3
# More words for pip, such as the place of a CPU build of torch: make run PIP_ARGS="--find-links /mnt/wheels"
PIP_ARGS ?=
BIN := .venv/bin
WORKERS ?= 2

.PHONY: run test lint types contracts unit integration docker bench images env clean

run: .venv/.triton
	$(BIN)/enginehouse run examples/digits/pipeline.yaml

test: lint types contracts unit integration

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

contracts: .venv/.installed
	$(BIN)/lint-imports

unit: .venv/.installed
	$(BIN)/pytest tests/unit -n $(WORKERS) -q

integration: .venv/.triton
	$(BIN)/pytest tests/integration -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not docker and not extras and not services" -q

# Needs a Docker engine at $DOCKER_HOST, mmdebstrap and docker-registry; .ci/run brings all three.
docker: images
	$(BIN)/pytest tests/integration -m docker -q

# The CPU images, made without any container registry.
images: .venv/.installed
	$(BIN)/python containers/build triton
	$(BIN)/python containers/build trainer

# Fifty releases, each but a few followed by going back, under steady traffic: about ten minutes. Then the trainer.
bench: .venv/.triton
	$(BIN)/python benchmarks/swap_under_load.py
	$(BIN)/python benchmarks/training.py

env: .venv/.triton

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": name another with make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "Linux on x86_64 is needed, this is $$(uname -sm)"; exit 1; }
	@echo "Installing Enginehouse into .venv (some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[cpu,docker,examples,dev]'
	@touch $@

# A Triton server for this machine's processor, in an environment of its own inside .venv.
.venv/.triton: .venv/.installed containers/triton/requirements.txt
	$(BIN)/enginehouse serve setup
	@touch $@

clean:
	@if [ -x $(BIN)/enginehouse ]; then $(BIN)/enginehouse serve stop; fi
	rm -rf .venv .enginehouse .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find model_repo -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
