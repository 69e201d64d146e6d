# Two commands do all the set-up: `make demo` and `make test`. All targets make .venv once and use it again.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
LONG := $(addprefix tests/test_,faults.py inputs.py resume.py kernels.py ddp.py checkpoint.py saved.py identity.py lock.py damage.py scripts.py any_vit.py)
DEMO := $(addprefix tests/test_commands.py::test_the_demo_,solves_parity_while_the_transformer_does_not finds_digits_on_a_large_canvas)

.PHONY: demo test test-long test-faults docs lint tables clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/adatape demo

test: $(READY) lint
	$(BIN)/python -m pytest -n 2

# What takes too long for every change: a hundred kills, a rank killed three times under torchrun, every resume at 50 + 50
# steps, 1,000 wrong inputs, every kernel shape, the whole demo. Ten to fifteen minutes on two cores.
test-long: $(READY)
	ADATAPE_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(LONG) $(DEMO)

test-faults: test-long

# The docs as a site, build/docs/index.html: about a minute, no network. Notebooks are run, and a warning is an error.
docs: $(READY)
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees -b html docs build/docs

# The docs' tables and pictures, from the files under results/.
tables: $(READY)
	$(BIN)/python research/tables.py --write
	$(BIN)/python research/pictures.py
	$(BIN)/python research/concept_pictures.py

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
	rm -rf .venv runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
