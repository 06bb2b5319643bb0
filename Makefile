# `make demo` and `make test` are all that a new user needs; each makes .venv first where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint format bench bench-train bench-serve soak docs clean

demo: $(READY)
	$(BIN)/shardline demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Predicted against measured memory of real runs; a few minutes.
bench: $(READY)
	$(BIN)/python bench/plan_memory.py

# A training step against plain PyTorch loops in alternation; about eight minutes on two quiet cores.
bench-train: $(READY)
	$(BIN)/python bench/train.py --table docs/benchmarks.md

# The serving engine against transformers (and vLLM, where VLLM_PYTHON names an interpreter that has it) in alternation.
bench-serve: $(READY)
	$(BIN)/python bench/serve.py --overhead
	$(BIN)/python bench/serve.py $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

# Wrong requests, Schemathesis over /openapi.json, and clients that hang up, by the thousand; some minutes.
soak: $(READY)
	cd tests && ../$(BIN)/python -m serving.soak

# The generated pages of docs/: the config's keys, the verbs' help, the table of families (from its tests, a minute) and that
# of layouts (from the parity gate, five minutes).
docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/models_table.py
	$(BIN)/python docs/parity_table.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch comes first and by the constraints file, so that nothing else can choose another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Shardline needs Python 3.11 or newer; set PYTHON=..."'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): torch first, then the rest; this takes a minute or more."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
