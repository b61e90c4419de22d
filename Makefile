# Two commands: `make demo` and `make test`. Both set up a virtual environment in .venv once.
PYTHON ?= python3
PIP_ARGS ?=
# On a machine with a GPU: make demo TORCH_INDEX=<address of a PyTorch wheel index> CONSTRAINTS=
TORCH_INDEX ?=
CONSTRAINTS ?= -c constraints.txt
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all lint bench docs setup browser clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(PIP_ARGS) torch
	$(BIN)/python -m pip install -q $(CONSTRAINTS) $(PIP_ARGS) -e ".[report,ui,export,sign,test,dev]"
	touch $(READY)

# Threads that wait sleep: where other programs use the cores too, waiting in a loop makes these small layers ten times slower.
demo: export OMP_WAIT_POLICY = PASSIVE
demo: $(READY)
	$(BIN)/erlangen train --data rotated_digits --model c8-tiny --mechanism rep --epsilon 3 --batch 512 --steps 100 --lr 1 \
		--set momentum=0 --set 'mechanism_options={"power": 0.5}' --out runs/demo --overwrite

# Two processes, a thread each: more threads than cores wait for one another in every small layer.
test test-all: export OMP_NUM_THREADS = 1
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# For the tests of reports in a real browser; where it cannot be installed they are skipped and say so.
browser:
	@command -v chromedriver >/dev/null 2>&1 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		timeout 300 sh -c 'apt-get update -qq && apt-get install -y -qq chromium chromium-driver' >/dev/null 2>&1; } || \
		echo "no browser here: install chromium and its driver for the browser tests"

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

bench: $(READY)
	mkdir -p build/bench
	$(BIN)/python benchmarks/step.py --model lenet --batch 256 --steps 20 --methods plain erlangen --json > build/bench/lenet.json
	$(BIN)/python benchmarks/step.py --model opacus-cnn --batch 256 --steps 20 --methods plain erlangen --json > build/bench/opacus-cnn.json
	$(BIN)/python benchmarks/step.py --model resnet9 --batch 32 --methods plain erlangen --json > build/bench/resnet9.json
	$(BIN)/python benchmarks/step.py --model eq-resnet9 --batch 32 --methods plain erlangen --json > build/bench/eq-resnet9.json
	$(BIN)/python benchmarks/guard.py build/bench/*.json

docs: $(READY)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) $(PIP_ARGS) -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist src/*.egg-info
