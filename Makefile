# Every target makes .venv and installs into it by itself: python3 and make are all that is needed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BENCH_READY := .venv/.bench
# The stateful mock of OpenAI's files and batches that their provider is tested against: a program for Node.
AIMOCK := @copilotkit/aimock@1.43.0
AIMOCK_READY := .venv/aimock/.ready-1.43.0

.DEFAULT_GOAL := help
.PHONY: help demo demo-audit dev test soak crash proof spec spec-deep trails bench lint generate verify clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

# The stamp is written last, so a .venv whose making was cut short is made anew.
$(READY): pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

$(AIMOCK_READY): | $(READY)
	@if command -v node > /dev/null; then \
		npm install --silent --no-audit --no-fund --no-save --no-package-lock --ignore-scripts \
			--prefix .venv/aimock $(AIMOCK) && touch $@; \
	else echo "node is absent: the tests against aimock are skipped"; fi

demo: $(READY) ## real jobs through Temporal and Postgres, with a worker killed in the middle
	$(BIN)/python -m examples.research.demo

demo-audit: $(READY) ## evaluation, experiment, replay and causal audit of a support agent, with workers killed
	$(BIN)/python -m examples.audit

dev: $(READY) ## Postgres and a Temporal server with its UI, until Ctrl-C
	$(BIN)/durable-jobs dev

# Most tests wait for servers rather than for a core: four processes, each with servers of its own. What failed is run
# once more by itself: machines are shared, and a server that started too slowly is no defect. A run that did not get
# to its end (any other exit status than 1) has no second chance.
test: $(READY) $(AIMOCK_READY) ## the test suite, against real servers
	$(BIN)/python -m pytest -n 4 --dist loadfile $(ARGS) \
		|| { [ $$? -eq 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

soak: $(READY) ## many jobs over three workers while processes and servers die, and all invariants; ARGS="--seed 7"
	$(BIN)/python -m tests.soak $(ARGS)

spec: $(READY) ## TLC over the model of one job in spec/, and its mutants; needs Java 11 or later; minutes
	$(BIN)/python spec/check.py $(ARGS)

spec-deep: $(READY) ## the same with larger bounds and three workers, at leisure; ARGS="--seconds 3600"
	$(BIN)/python spec/check.py --deep $(ARGS)

trails: $(READY) $(AIMOCK_READY) ## the suite, its event trails recorded, and each of them checked to be a behaviour of the model
	rm -rf build/trails
	DURABLE_JOBS_TRAILS=build/trails $(BIN)/python -m pytest -n 4 --dist loadfile $(ARGS)
	$(BIN)/python -m tests.spec_trails build/trails

crash: $(READY) ## a worker killed at each step that leaves it, one run for each; ARGS="--shape dispatching --only 7"
	$(BIN)/python -m tests.crash $(ARGS)

proof: $(READY) ## the model at length, recorded histories under faults, every network fault; ARGS="--parts network"
	$(BIN)/python -m tests.proof $(ARGS)

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[bench]'
	touch $(BENCH_READY)

bench: $(BENCH_READY) ## every budget measured side by side; BENCH=quick for two minutes, ARGS="--only jobs" for a part
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generate: $(READY) ## write what is rendered from the transition table
	$(BIN)/python -m durable_jobs.contract.render --write

verify: $(READY) ## fail where rendered text has drifted, or where the wheel holds more than durable_jobs
	$(BIN)/python -m durable_jobs.contract.render --check
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . > /dev/null
	$(BIN)/python scripts/check_wheel.py build/wheel/*.whl

clean: ## remove all that the other targets made, the dev servers' data included
	rm -rf .venv .durable-jobs build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
