# `make` lists the targets. The first call sets up .venv (scripts/python.sh); ARGS goes to the tool, as in
#   make test ARGS="-k mesh"
SHELL := bash
ARGS ?=
# Two workers; each takes a whole file of tests, those of tests/dist first. One that ends at a test's limit would run that
# test again in its next life, and again.
in_two = -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -p tests.cost.summary
in_env = python=$$(scripts/python.sh dev float8 hf plot tune wandb) && "$$python" -m

# Hundreds of processes of the tests would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help test sweep check matrix format bench

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

test:  ## run the tests that guard a change
	@$(in_env) pytest $(in_two) $(ARGS)

sweep:  ## run the sweeps: more cases of what the tests show, and some that take long
	@$(in_env) pytest $(in_two) -m sweep $(ARGS)

check:  ## ruff, mypy --strict on titan/, planner/, inference/ and testing/, and the rules for imports, prose and commits
	@$(in_env) ruff check .
	@$(in_env) ruff format --check .
	@rm -rf build/typed && mkdir -p build/typed/titan && ln -s $(abspath $(wildcard titan/*) planner inference testing) build/typed/titan
	@$(in_env) mypy
	@$(in_env) pytest -q tests/unit/test_import_layers.py tests/unit/test_prose.py

matrix:  ## on each PyTorch that titan is for, in an environment of its own: what a release breaks first (an hour, 20 GB)
	@$(in_env) bench.versions $(ARGS)

format:  ## mend what ruff can mend
	@$(in_env) ruff check --fix .
	@$(in_env) ruff format .

bench:  ## measure on this CPU what has a target, beside other trainers that are installed (20 to 30 minutes)
	@$(in_env) bench $(ARGS)
