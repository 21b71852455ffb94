# Every target sets up what it needs in .venv and is cheap to repeat: what runs the indexer for `demo` and `serve`, what tests
# and checks it on top of that for the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.tested-with
NATIVE := $(wildcard native/*.hpp native/*.cpp) CMakeLists.txt
NATIVE_TESTS := tests/index tests/fuzzy tests/api/test_fuzzy.py tests/service/test_service.py tests/native/test_json_cut.py tests/api/test_short_way.py \
  tests/native/test_wire.py tests/native/test_request_head.py tests/ingest/test_wire_payload.py tests/ingest/test_plain_batch.py \
  tests/native/test_ending_memory.py
CPP_FILES := $(wildcard native/*.hpp native/*.cpp)
INSTALL := $(BIN)/python -m pip install --quiet
# Tests start hundreds of processes: without byte code each of them would compile the whole package once more.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait for processes and sockets a third of their time: four workers keep two cores busy; what only computes has one
# for a core. Each has a stretch of the tests, and who is done takes half of what another has left: no core waits for the
# longest file.
WORKERS ?= 4
CORES := $(shell nproc)
PYTEST := $(BIN)/python -m pytest --dist worksteal --numprocesses
# Two things at a time, each as soon as it can: the two builds of the core, installing, and mypy take one core for long.
# (Not told to what runs in a recipe: ninja would take it for its own bound.)
MAKEFLAGS += --jobs=2
unexport MAKEFLAGS

.PHONY: demo serve test suite sanitize check bench soak audit sbom fmt clean

$(VENV)/.built-with: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade "pip>=25.1"
	$(INSTALL) --group build
	@touch $@

$(STAMP): $(VENV)/.built-with $(NATIVE)
	$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(DEV): pyproject.toml | $(STAMP)
	$(INSTALL) --group dev
	$(BIN)/python -m pip check
	@touch $@

# First the answers checked against what real engines reused, then a minute of simulated pods and traffic.
demo: $(STAMP) $(if $(PICTURE),$(DEV))
	$(BIN)/kvindexer replay tests/data/captures/v0.32.0-workload
	$(BIN)/kvindexer demo --seconds $(or $(SECONDS),60) $(if $(PICTURE),--picture $(PICTURE))

serve: $(STAMP)
	$(BIN)/kvindexer serve

# `test` is `suite` once `sanitize` is done: tests have deadlines, so these two do not run side by side.
test: sanitize
test suite: $(STAMP) $(DEV)
	$(PYTEST) $(WORKERS)

# The native core and all that calls it directly, under the address and undefined-behaviour sanitizers.
SANITIZED := build/sanitize
SANITIZED_STAMP := $(SANITIZED)/.built
SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 TEST_CORE="$$(ls $(SANITIZED)/_native.*.so)"
$(SANITIZED_STAMP): $(VENV)/.built-with $(NATIVE)
	@$(BIN)/cmake -G Ninja -S . -B $(SANITIZED) -DKVINDEXER_SANITIZE=ON -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >/dev/null
	@$(BIN)/cmake --build $(SANITIZED) >/dev/null
	@touch $@

sanitize: $(STAMP) $(DEV) $(SANITIZED_STAMP)
	$(SANITIZERS) $(PYTEST) $(CORES) -q $(NATIVE_TESTS)
	$(SANITIZERS) PYTHONMALLOC=malloc RAW_BYTES_EXAMPLES=250 $(PYTEST) $(CORES) -q tests/test_raw_bytes.py

# PEER=1 measures Dynamo in the same run.
bench: $(STAMP) $(DEV)
	$(if $(PEER),$(INSTALL) --group bench-peers)
	$(BIN)/python -m benchmarks $(if $(PEER),--peer)

# Load, faults and strangers at once, for so many SECONDS; docs/reliability.md says what is a violation.
soak: $(STAMP) $(DEV)
	$(BIN)/python -m benchmarks.soak --seconds $(or $(SECONDS),300) --json build/soak.json

check: $(STAMP) $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml

# Known vulnerabilities of what the image is built with. Asks a public service, so it is no part of `check`; a
# dependency that the service does not know is a failure here, and not a silence.
AUDIT := build/audit
audit:
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(AUDIT)/bin/python -m pip install --quiet --group audit
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement deploy/constraints.txt

# What the image is built with, as CycloneDX JSON. Nothing is asked of anybody.
SBOM := build/kvindexer.cdx.json
sbom: $(STAMP) $(DEV)
	@mkdir -p $(dir $(SBOM))
	$(BIN)/cyclonedx-py requirements deploy/constraints.txt --pyproject pyproject.toml --output-reproducible \
	  --validate --output-format JSON --output-file $(SBOM)

fmt: $(STAMP) $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
