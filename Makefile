# `make` lists the targets. The first call sets up .venv (scripts/python.sh); ARGS goes to the tool, as in
#   make test ARGS="-k mesh"
SHELL := bash
ARGS ?=
in_env = python=$$(scripts/python.sh dev float8 hf plot tune wandb) && "$$python" -m

.DEFAULT_GOAL := help
.PHONY: help test check format bench

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

test:  ## run all tests
	@$(in_env) pytest $(ARGS)

check:  ## ruff, mypy --strict on titan/, and the rules for imports, prose and commits
	@$(in_env) ruff check .
	@$(in_env) ruff format --check .
	@$(in_env) mypy
	@$(in_env) pytest -q tests/unit/test_import_layers.py tests/unit/test_prose.py

format:  ## mend what ruff can mend
	@$(in_env) ruff check --fix .
	@$(in_env) ruff format .

bench:  ## measure the trainer's overhead over a bare PyTorch loop
	@$(in_env) bench.overhead $(ARGS)
