# Two commands matter: `make demo` and `make test`. Each sets up what it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test test-fast soak check fix bench clean

demo: $(STAMP)
	"$(BIN)/rung" launch examples/stdlib_lm/job.yaml

test: $(STAMP)
	"$(BIN)/python" -m pytest -m "not soak"

test-fast: $(STAMP)
	"$(BIN)/python" -m pytest -m "not slow and not soak"

soak: $(STAMP)
	"$(BIN)/python" -m pytest -m soak -v

check: $(STAMP) build/typecheck/rung
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	MYPYPATH=build/typecheck "$(BIN)/mypy" --explicit-package-bases --namespace-packages -p rung

fix: $(STAMP)
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

bench: $(STAMP)
	"$(BIN)/python" -m benchmarks

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit("rung needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=...") if sys.version_info < (3, 10) else None'
	test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77' wheel
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch "$@"

# mypy does not follow the import hook of an editable install; it sees the namespace through these links.
build/typecheck/rung:
	mkdir -p build/typecheck/rung
	for p in launcher strategies cluster; do ln -sfn "../../../$$p" "build/typecheck/rung/$$p"; done

clean:
	rm -rf "$(VENV)" build *.egg-info .mypy_cache .pytest_cache .ruff_cache
