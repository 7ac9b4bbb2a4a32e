"""The notebooks: kept without outputs, and run from their first cell to their last."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A quarter of the training, after which the network already says something.
SHORTER = {
    "pronouncer": {
        '"data.num_training": "8000"': '"data.num_training": "2000"',
        '"data.num_test": "500"': '"data.num_test": "100"',
    }
}


def read(path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["lattice-by-hand", "own-encoder", "pronouncer"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in (
        ("PYTHONPATH", str(ROOT)),
        ("JUPYTER_PLATFORM_DIRS", "1"),
        ("IPYTHONDIR", str(tmp_path / "ipython")),
    ):
        monkeypatch.setenv(name, value)
    notebook = read(path)
    for long, short in SHORTER.get(path.stem, {}).items():
        [cell] = [cell for cell in notebook.cells if long in cell.source]
        cell.source = cell.source.replace(long, short)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
