# Every target sets up what it needs in .venv and is cheap to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard native/*.hpp native/*.cpp) CMakeLists.txt
CPP_FILES := $(wildcard native/*.hpp native/*.cpp)

.PHONY: demo serve test check bench fmt clean

$(VENV)/.dependencies: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

$(STAMP): $(VENV)/.dependencies $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	@touch $@

serve: $(STAMP)  ## start the indexer on 127.0.0.1:8080
	$(BIN)/kvindexer serve

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
