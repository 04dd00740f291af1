# kivi: every task of the project. Needs Python 3.11 or newer and make; the rest is installed into .venv.

PYTHON ?= python3
MINUTES ?= 30
GOAL ?= all
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
say = @printf 'kivi: %s\n'

# The tests start hundreds of processes: each would compile kivi again where the environment says to keep no bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv test tests pythons stories check quick types properties docs soak fuzz audit pins mutants bench demo cluster-demo reconcile proto format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Create .venv and install everything into it (the other tasks do so by themselves)
	$(say) '$(VENV) is ready'

# In five processes, by file, on two cores too: fewer leave much of the time to waiting (for a browser, a server, a timer).
# What they leave is enough for mypy, which waits behind them. Where the time of all this goes: decision 0107.
test: $(INSTALLED) ## Run the checks, then the tests, with those of types beside them
	@$(MAKE) --no-print-directory -j 2 quick $(COMPILED)
	@$(MAKE) --no-print-directory -j 2 types tests

tests: $(COMPILED)
	$(say) 'tests'
	@$(BIN)/python -m pytest -q -n 5 --dist loadgroup --no-loadscope-reorder -m 'not story' --ignore tests/test_layers.py

# What works on disk, or between processes or threads, is what differs from one Python to another: files, wires, crashes
# and races. By day they run on the oldest and the newest Python that is here; by night (.ci/nightly) every one runs all of
# the store and of the client. The rest of the tests needs Spark, browsers and servers of others, says the same through
# another door (api, golden), or computes and does no more (delta, properties, the model of mvcc and its records), and
# runs on one.
PYTHONS := --ends
SUITES := engine log client store/test_crash.py store/test_race.py
COMPUTES := mvcc/test_model.py mvcc/test_record.py

pythons: $(INSTALLED) ## Run the tests of disks, wires, crashes and races on other supported Pythons that are here
	@$(BIN)/python tools/pythons.py $(PYTHONS) -q -n 5 --dist loadgroup --no-loadscope-reorder \
	    -m 'not story and not hypothesis' $(SUITES:%=tests/%) $(COMPUTES:%=--ignore=tests/%)

properties: $(INSTALLED) ## Try each property with twenty times the examples of make test, and more histories (.ci/nightly does)
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m hypothesis --hypothesis-profile nightly --timeout 3000

# In four: with many more Spark, which gives a Python process ten seconds to answer, may not get it in time.
stories: $(COMPILED) ## The long tests: Spark, clusters, the site, the package, the image (CI runs them too)
	$(say) 'stories'
	@$(BIN)/python -m pytest -q -n 4 --dist loadgroup --no-loadscope-reorder -m story

check: quick types ## Formatting, lint, layers, protos, generated code, types

quick: $(INSTALLED)
	$(say) 'check: formatting (make format mends it)'
	@$(BIN)/ruff format --check --output-format concise .
	$(say) 'check: lint'
	@$(BIN)/ruff check --quiet --output-format concise .
	$(say) 'check: layers'
	@$(BIN)/python -m pytest -q --no-header tests/test_layers.py
	$(say) 'check: protos'
	@$(BIN)/buf lint proto
	@for released in proto/released/*.binpb; do $(BIN)/buf breaking proto --against $$released || exit 1; done
	$(say) 'check: generated code is current (make proto mends it)'
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	    $(BIN)/python proto/generate.py "$$fresh" && diff -r -x __pycache__ kivi/wire/v1 "$$fresh"

# Where its workers do not start within 3 s, as on a busy machine, mypy ends with 2: once more, then, and by itself.
types: $(INSTALLED)
	$(say) 'check: types'
	@nice $(BIN)/mypy --no-error-summary || { [ $$? = 2 ] && nice $(BIN)/mypy --no-error-summary --num-workers 0; }

docs: $(INSTALLED) ## Build the documentation into build/docs; a warning or a dead link is an error
	@$(BIN)/python -m sphinx -q -W --keep-going -n -d build/docs-cache docs build/docs
	$(say) 'build/docs/index.html'

soak: $(INSTALLED) ## Run every checker for MINUTES (default 30) and write soak-report.md; CLUSTER=1: a cluster under attack, cluster-soak-report.md
	@$(BIN)/python -m tests.proof.soak --minutes $(MINUTES) $(if $(CLUSTER),--cluster --report cluster-soak-report.md)

fuzz: $(INSTALLED) ## Look for bytes that no reader takes, MINUTES=30 for each target
	$(say) 'fuzzing'
	@$(BIN)/python tools/install.py --only fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# The audit is by the pins, so that all of them are looked up; --strict: one that could not be is an error, and no silence.
audit: $(INSTALLED) ## What is installed: build/audit/sbom.json, licences.md; then known vulnerabilities of all pins, an error if any
	@test -x $(VENV)-audit/bin/pip-audit || $(BIN)/python -m venv --clear $(VENV)-audit
	@$(VENV)-audit/bin/python tools/install.py --only audit
	@mkdir -p build/audit
	@$(VENV)-audit/bin/cyclonedx-py environment --output-reproducible --spec-version 1.6 -o build/audit/sbom.json $(BIN)/python
	$(say) 'build/audit/sbom.json (CycloneDX)'
	@$(VENV)-audit/bin/pip-licenses --python $(BIN)/python --format markdown --with-urls --output-file build/audit/licences.md > /dev/null
	$(say) 'build/audit/licences.md'
	@$(VENV)-audit/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off -r constraints.txt

# Needs no .venv, which cannot be made where pyproject.toml asks for what is not pinned yet.
pins: ## Pin what pyproject.toml asks for, versions as they are: ARGS="--upgrade-package NAME" (or --upgrade) moves them
	@test -x $(VENV)-pins/bin/uv || $(PYTHON) -m venv --clear $(VENV)-pins
	@$(VENV)-pins/bin/python tools/install.py --only pins
	@$(VENV)-pins/bin/uv pip compile -q --no-config --system-certs --universal --python-version 3.11 --all-extras \
	    --generate-hashes --no-annotate --custom-compile-command 'make pins' $(ARGS) -o constraints.txt pyproject.toml

mutants: $(INSTALLED) ## Plant the bugs that the rules list, one by one: their checkers must turn red
	@$(BIN)/python -m tests.proof.mutate

bench: $(INSTALLED) ## Measure beside peers: GOAL=1 to 20 (default all), ARGS=--quick for a brief run
	@$(BIN)/python -m bench $(if $(filter all,$(GOAL)),all,goal$(GOAL)) $(ARGS)

demo: $(INSTALLED) ## Run the APM demonstration: a server and its console, Spark
	@$(BIN)/python -m apm_demo

cluster-demo: $(INSTALLED) ## Run the demonstration on three nodes, and kill some of it
	@$(BIN)/python -m apm_demo --cluster $(ARGS)

reconcile: $(INSTALLED) ## Recompute the demo's aggregates in Spark and compare: ARGS="--endpoint HOST:PORT"
	@$(BIN)/python -m apm_demo.reconcile $(ARGS)

proto: $(INSTALLED) ## Generate kivi/wire/v1 from proto/ again
	@rm -rf kivi/wire/v1
	@$(BIN)/python proto/generate.py

format: $(INSTALLED) ## Format the code and mend what lint can mend
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .

clean: ## Remove .venv, those of make pythons, and everything that was built or cached
	@rm -rf $(VENV) $(VENV)-* bench/.venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

NEWER := import sys; sys.exit(sys.version_info < (3, 11))

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
	    echo 'kivi: there is no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python'; exit 1; } >&2
	@$(PYTHON) -c '$(NEWER)' || { \
	    echo "kivi: needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name a newer one: make PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	    echo 'kivi: $(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt-get install python3-venv)'; exit 1; } >&2
	@$(BIN)/python -c '$(NEWER)' 2> /dev/null || { \
	    echo 'kivi: creating $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	$(say) 'installing pinned packages into $(VENV) (about 1.5 GB on disk, a minute or a few)'
# Nothing is compiled here: of what is installed the tests import an eighth, which is compiled then.
	@PIP_COMPILE=0 $(BIN)/python tools/install.py --editable spark,demo,docs,dev
	@touch $@

# The tests and what they import, once: their processes begin together, and each would do it.
$(COMPILED): $(INSTALLED)
	@$(BIN)/python -m pytest --collect-only -q > /dev/null 2>&1 || true
	@touch $@
