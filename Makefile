# torchrec-oper: `make help` lists the targets. Every one first brings .venv up to date.
# Works from any folder, also as `make -f "/some where/Makefile"`: recipes find the
# project through the environment, where a path with spaces stays in one piece.
export OPER_MAKEFILE := $(MAKEFILE_LIST)
export OPER_PYTHON := $(or $(PYTHON),python3)

# MAKEFILE_LIST may begin with a space of make's own.
ROOT = root="$$(cd "$$(dirname -- "$${OPER_MAKEFILE\# }")" && pwd)" && python="$$root/.venv/bin/python"
SET_UP = $(ROOT) && "$$OPER_PYTHON" "$$root/tools/set_up.py"
IN_ROOT = $(SET_UP) && cd "$$root"

ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test lint types build clean

help:
	@echo 'make train   train a DLRM on 2 ranks of this machine, on generated clicks or yours'
	@echo '             (make train ARGS="--help" lists the options)'
	@echo 'make test    run the tests                (ARGS="-k planner" for some of them)'
	@echo 'make lint    check style: ruff, clang-format'
	@echo 'make types   check types: mypy --strict'
	@echo 'make build   build the kernels in place and a wheel in dist/'
	@echo 'make clean   remove what was built; .venv stays'
	@echo 'Another Python than python3:  make PYTHON=python3.11 test   (3.10 to 3.13)'

# Stays in the current folder, so that paths in ARGS mean what they say. The program starts
# its ranks as torchrun does, but ends on Ctrl-C without torchrun's traceback.
train:
	@$(SET_UP) && "$$python" "$$root/examples/train_dlrm.py" $(ARGS)

test:
	@$(IN_ROOT) && "$$python" -m pytest $(ARGS)

lint:
	@$(IN_ROOT) && "$$python" -m ruff check && "$$python" -m ruff format --check && \
		find kernels '(' -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' ')' \
		-print0 | xargs -0 -r .venv/bin/clang-format --dry-run -Werror

types:
	@$(IN_ROOT) && "$$python" -m mypy

# build/lib is removed first: setuptools would put modules deleted since into the wheel.
build:
	@$(IN_ROOT) && rm -rf build/lib* build/bdist* && \
		"$$python" -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	@$(ROOT) && cd "$$root" && rm -rf build dist *.egg-info torchrec_oper/_kernels.so \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache && \
		find . -name .venv -prune -o -name .git -prune -o -type d -name __pycache__ \
		-prune -exec rm -rf {} +
