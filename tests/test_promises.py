"""The promises of the architecture page and of CONTRIBUTING about the whole package."""

import ast
import importlib
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import transduce

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transduce"
# From the top of the tree down. The files of a folder come together; its __init__ comes last.
ORDER = [
    *("alphabet", "arpabet", "files", "settings", "sequences"),
    *("data.pairs", "data.records", "data.manifest", "data.kaldi", "data.lhotse"),
    *("data.common_voice", "data.parquet", "data.shards", "data.kinds", "data.contents"),
    *("data.timit", "data.dictionaries", "data.batches", "data"),
    *("kernels.openmp", "kernels.simd.cache", "kernels.simd.options", "kernels.simd.threads"),
    *("kernels.simd.functions", "kernels.simd.products", "kernels.simd.int8"),
    *("kernels.simd.affine", "kernels.simd"),
    *("kernels.sentinels", "kernels.backends", "kernels.nvrtc", "kernels"),
    *("audio.resampling", "audio.pcm", "audio.live", "audio.sound", "audio.augmentation"),
    "audio.spectra",
    *(
        "audio.features",
        "audio.outputs",
        "audio.inversion",
        "audio.lengths",
        "audio.stream",
        "audio.batched",
        "audio.cache",
        "audio.windows",
        "audio",
    ),
    *("lstm.reference", "lstm.eager", "lstm.cpu", "lstm.cuda", "lstm.tensor_cores"),
    *("lstm.operators", "lstm.layer", "lstm", "networks", "transcription"),
    *("lattice.reference", "lattice.cpu.diagonals", "lattice.cpu.rows", "lattice.cpu.additive"),
    *(
        "lattice.cpu.parts",
        "lattice.cpu.emissions",
        "lattice.cpu.distillation",
        "lattice.cpu.detours",
        "lattice.cpu.arrows",
        "lattice.cpu.joint",
        "lattice.cpu",
        "lattice.cuda",
    ),
    *("lattice.checks", "lattice.operators", "lattice.loss", "lattice.variants"),
    *("lattice.consistency", "lattice.distillation", "lattice.mixtures", "lattice"),
    *("graphones.reference", "graphones.segmentation", "graphones.ngram", "graphones.model"),
    "graphones",
    *("decoding.protocols", "decoding.hypothesis", "decoding.fusion", "decoding.arpa"),
    *("decoding.options", "decoding.problem", "decoding.reference", "decoding.cpu.prediction"),
    *("decoding.cpu.trie", "decoding.cpu.heaps", "decoding.cpu.beam", "decoding.cpu.greedy"),
    *("decoding.cpu", "decoding.trie", "decoding.eager", "decoding.utterances", "decoding.cuda"),
    *("decoding.search", "decoding.stream", "decoding.steps", "decoding.ctc", "decoding.ensemble"),
    *("decoding.generation", "decoding"),
    *("evaluation", "architectures"),
    *("model.signature", "model.header", "model.tensors", "model.joint_ngram", "model.checkpoint"),
    "model.formats",
    *(
        "model.transcripts",
        "model.inputs",
        "model.reading",
        "model.stream",
        "model.utterances",
        "model.speech",
        "model.model",
        "model.lines",
        "model.evaluate",
        "model",
    ),
    *("alignment.pronunciations", "alignment.detours", "alignment.variants"),
    "alignment.bands",
    "alignment.phone_hmm",
    "alignment.acoustics",
    *("alignment.boundaries", "alignment.long", "alignment.result", "alignment.align", "alignment"),
    "tables",
    *("training.corpus", "training.recipe", "training.inspection", "training.pretraining"),
    *("training.regularisation", "training.progress", "training.lock", "training.checks"),
    "training.joint_ngram",
    *("training.launch", "training.peers", "training.loading"),
    *("training.teacher_models", "training.teachers"),
    *("training.risk", "training.card", "training.fit", "training"),
    *("analysis.lattice", "analysis.sensitivity", "analysis.colours", "analysis.figures"),
    "analysis.data_figure",
    *("analysis.speech", "analysis"),
    "demo",
    *("export.graphs", "export.folder", "export"),
    *("http.sounds", "http.hosts", "http.connections", "http.sockets", "http"),
    *(
        "web.wire",
        "web.recording",
        "web.explorer",
        "web.speech",
        "web.microphone",
        "web.server",
        "web",
    ),
    *("serving.limits", "serving.metrics", "serving.batching", "serving.formats"),
    *(
        "serving.service",
        "serving.guard",
        "serving.streams",
        "serving.api",
        "serving.server",
        "serving",
    ),
    *("cli.terminal", "cli.outputs", "cli.shard_files", "cli.ray_engine", "cli.bulk", "cli.runs"),
    *("cli.search", "cli.evaluate", "cli.train"),
    "cli.inspect",
    *(
        "cli.transcribe",
        "cli.align",
        "cli.listen",
        "cli.speak",
        "cli.plot",
        "cli.explore",
        "cli.export",
        "cli.serve",
        "cli.warm_up",
        "cli",
    ),
    "__main__",
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transduce."):
            yield node.module.removeprefix("transduce.")


@pytest.mark.parametrize("name, path", list(modules()), ids=lambda x: x if type(x) is str else "")
def test_a_file_imports_only_from_files_above_it(name, path):
    if name == "__init__":
        return
    for imported in imports(path):
        assert ORDER.index(imported) < ORDER.index(name), f"{name} imports {imported}"
    if name.startswith(("lstm", "lattice")):
        assert "networks" not in set(imports(path))


def other_imports(path):
    """Yield imports of other forms than `from transduce.x import y`; "" is the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name[10:] for a in node.names if (a.name + ".").startswith("transduce."))
        elif isinstance(node, ast.ImportFrom) and node.module == "transduce":
            names = dict(modules())
            yield from (a.name if a.name in names else "" for a in node.names)


def test_other_forms_of_import_point_upwards_too():
    lowest = max(ORDER.index(name) for name in imports(PACKAGE / "__init__.py"))
    for name, path in modules():
        if name == "__init__":
            continue
        assert not re.search(r"^\s*from \.", path.read_text(), re.M), f"{name} imports relatively"
        if name.startswith(("lstm", "lattice")):
            assert "networks" not in set(other_imports(path))
        for imported in other_imports(path):
            above = ORDER.index(imported) if imported else lowest
            assert above < ORDER.index(name), f"{name} imports {imported or 'the package'}"


def test_importing_needs_no_more_than_pytorch_and_numpy():
    blocked = "numba llvmlite triton soundfile matplotlib safetensors rapidfuzz cyclopts rich"
    blocked += " lightning_fabric"
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked.split()}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import torch
import transduce
model = transduce.Transducer(3, 4, 5)
f, g, num_frames = model(
    torch.ones(2, 3).long(), torch.tensor([3, 2]), torch.ones(2, 1).long(), backend="reference"
)
transduce.transducer_loss(
    f, g, torch.ones(2, 1).long(), num_frames, torch.tensor([1, 0]), backend="reference"
).sum().backward()
assert not set({blocked.split()}) & {{name.split(".")[0] for name in sys.modules}}
try:
    import numba
except ImportError:
    pass
else:
    raise AssertionError("nothing was blocked")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_loading_a_model_imports_no_training_no_corpus_and_no_terminal():
    unwanted = (
        "rich lightning lightning_fabric transduce.training transduce.data.timit "
        "transduce.data.dictionaries transduce.tables numba sympy"
    )
    code = f"""
import sys
import transduce.model.evaluate
import transduce.model.model
transduce.model.model.load("english-pronouncer")
found = [name for name in {unwanted.split()} if name in sys.modules]
assert not found, found
assert "transduce.evaluation" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_architecture_page_lists_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"```\ntransduce/\n(.*?)```", page, re.S)[1]
    drawn = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    for _, path in modules():
        if path.name != "__init__.py":
            assert path.name in drawn, f"{path.name} is not in the tree of docs/architecture.md"


SCRIPTS = sorted(
    path for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_only_names_that_the_package_has(script):
    """Benchmarks take minutes, and no test runs them all."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transduce":
            module = importlib.import_module(node.module)
            for alias in node.names:
                submodule = (
                    find_spec(f"{node.module}.{alias.name}")
                    if module.__spec__.parent == node.module
                    else None
                )
                assert hasattr(module, alias.name) or submodule, f"{node.module}.{alias.name}"


def test_a_misspelt_option_exits_with_an_error_that_names_the_right_one(tmp_path):
    done = transduce("demo", "--sede", "3", folder=tmp_path)
    assert done.returncode != 0
    assert "--seed" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_has_the_recipes_and_trains_them_by_name(tmp_path):
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], check=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = """
import transduce, sys
from transduce.cli import app
assert "installed" in transduce.__file__
try:
    app(["recipes"])
except SystemExit:
    pass
app(["train", "pairs-transducer"])
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    # The recipe was read: it lacks only its data.
    said = "data.training is not set, and the corpus tsv needs it; give --data.training PATH"
    assert done.stderr == f"transduce: {said}\n"


def test_links_point_to_existing_files():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        links = re.findall(r"\]\(([^)#]+)", page.read_text())
        local = [link for link in links if not link.startswith("http")]
        assert local or page.parent != ROOT
        assert [link for link in local if not (page.parent / link).exists()] == [], page
