# Every command of the project. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup train test check format test-slow test-learning test-browser test-newcomer test-gpu test-soak test-chaos test-fuzz test-loops \
        test-jax-versions docs bench results matrix bless clean

# Say PYTHON=/path/to/python to choose an interpreter; otherwise the first that fits is taken.
PYTHON ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.ready-dev ## Install everything into .venv (quick when nothing changed)

train: .venv/.ready-run ## Train PPO on CartPole-v1
	@$(BIN)/shoal train ppo CartPole-v1

test: check ## Run the checks and all quick tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

check: .venv/.ready-dev ## Check format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --cache-dir .cache/import-linter

format: .venv/.ready-dev ## Format the code and fix what can be fixed by machine
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-slow: .venv/.ready-dev ## Run the tests that take longer than ten seconds each
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --timeout 900

test-learning: .venv/.ready-dev ## Run the tests that train until something is learnt
	@$(BIN)/python -m pytest -m learning --timeout 1800

test-browser: .venv/.ready-dev ## Look at all pages in Chromium (BROWSER_SHOTS=folder keeps screenshots; CHROMIUM=/path/to/it)
	@$(BIN)/python -m pytest -m browser --timeout 600

test-newcomer: .venv/bin/python ## Build the packages, install the wheel, and follow docs/start.md from an empty folder (ARGS=--no-extras)
	@$(BIN)/python .ci/newcomer.py $(ARGS)

test-gpu: .venv/.ready-dev ## Run the tests that need a GPU (its own JAX must be installed)
	@$(BIN)/python -m pytest -m gpu --timeout 900

test-soak: .venv/.ready-dev ## Kill training runs at random moments (SOAK_ROUNDS=200 SOAK_SEED=0)
	@$(BIN)/python -m pytest -n 2 -m soak --timeout 300 --ignore tests/soak/test_chaos.py

test-chaos: .venv/.ready-dev ## Let a Ray cluster's workers, hosts, links and disk fail (CHAOS_SECONDS=600 CHAOS_SEED=0 CHAOS_KIND=lockstep, impala or served)
	@$(BIN)/python -m pytest -s -m soak tests/soak/test_chaos.py

test-fuzz: .venv/.ready-dev ## Send a million spoilt streams of frames (FUZZ_CASES=1000000 FUZZ_SEED=0)
	@$(BIN)/python -m pytest -m fuzz --timeout 3600

test-loops: .venv/.ready-dev ## Check cuts of many random loops: refused, or the loop's numbers (LOOPS=100000 LOOPS_SEED=0 LOOPS_KIND=random or plain, ARGS="--seconds 600 --failures FILE")
	@$(BIN)/python tests/laws/check_loops.py --loops $(or $(LOOPS),100000) --seed $(or $(LOOPS_SEED),0) \
	    --kind $(or $(LOOPS_KIND),random) $(ARGS)

test-jax-versions: ## Run the laws on the oldest and the newest JAX we allow
	@.ci/jax-versions

docs: .venv/.ready-dev ## Build the documentation site into build/site, without warnings
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "build/site/index.html"

bench: .venv/.ready-dev ## Run the benchmarks
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

results: .venv/.ready-dev ## Train every preset with five seeds and write docs/results.md
	@$(BIN)/python docs/make_results.py

matrix: .venv/.ready-dev ## Run every algorithm under every distribution policy and write docs/matrix.md
	@$(BIN)/python docs/make_matrix.py --fresh

bless: .venv/.ready-dev ## Accept today's prints as the golden ones (look at the diff before you commit)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --bless
	@git status --short tests/golden

clean: ## Remove environments, caches and builds (runs/ stays)
	rm -rf .venv .venvs .cache .bench build dist .hypothesis .pytest_cache .ruff_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The two stages of the environment: what running needs, then what developing needs.
.venv/.ready-run: pyproject.toml | .venv/bin/python
	@echo "Installing Shoal into .venv (once; a few minutes at most) ..."
	@$(PIP) -e '.[gymnax]'
	@touch $@

.venv/.ready-dev: pyproject.toml | .venv/bin/python
	@echo "Installing Shoal and its developer tools into .venv (once; a few minutes at most) ..."
	@$(PIP) -e '.[gymnax,dev]'
	@touch .venv/.ready-run $@

.venv/bin/python:
	@for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	    if [ -n "$$python" ] && "$$python" -c \
	        'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	        "$$python" -m venv .venv && exit; \
	        rm -rf .venv; exit 1; \
	    fi; \
	    if [ -n "$(PYTHON)" ]; then break; fi; \
	done; \
	echo "Shoal needs Python 3.11, 3.12 or 3.13; $(if $(PYTHON),$(PYTHON),python3) is" \
	     "$$( ($(if $(PYTHON),$(PYTHON),python3) --version) 2>&1 | head -1)." >&2; \
	echo "Install one of these, or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	exit 1
