# Two commands do all the set-up: `make demo` and `make test`. Both make .venv once and use it again.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-faults lint tables clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/adatape demo

test: $(READY) lint
	$(BIN)/python -m pytest -n 2

# A hundred kills, a rank killed three times, every resume at 50 + 50 steps, 1,000 wrong inputs: about eight minutes.
test-faults: $(READY)
	ADATAPE_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_resume.py tests/test_faults.py tests/test_ddp.py tests/test_checkpoint.py tests/test_saved.py tests/test_identity.py tests/test_inputs.py tests/test_lock.py tests/test_damage.py tests/test_scripts.py

# The docs' tables and pictures, from the files under results/.
tables: $(READY)
	$(BIN)/python research/tables.py --write
	$(BIN)/python research/pictures.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "adatape needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv (about 6 GB, a few minutes the first time) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
