# `make demo` and `make test` each create .venv and install everything they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check wheel bench clean

demo: .venv/installed
	$(BIN)/transduce demo

# Three processes, each with whole files of tests: two compute while another waits for a subprocess.
test: .venv/installed
	$(BIN)/pytest --numprocesses 3 --dist loadfile

check: .venv/installed wheel
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Build the wheel, and import it in an environment that has only PyTorch and NumPy.
wheel: .venv/installed
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist >/dev/null
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet "torch>=2.11,<2.14" numpy
	build/empty/bin/pip install --quiet --no-deps dist/*.whl
	cd build && empty/bin/python -c "import transduce; print('transduce', transduce.__version__, 'imports from', transduce.__file__)"

bench: .venv/installed
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/lstm.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/explore.py

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find transduce tests -name __pycache__ -prune -exec rm -rf {} +
