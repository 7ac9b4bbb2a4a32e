"""`transduce warm-up`: what it compiles is all that other commands need."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

CODE = """
import sys
from pathlib import Path
import numpy as np
import soundfile
import torch
from commands import WORDS, train_small_runs, transduce
from transduce.kernels.simd.cache import KernelCache

folder = Path(sys.argv[1])
asked = []
original = KernelCache.load_overload

def recorded(self, signature, context):
    asked.append(f"{self._file.name}:{self._py_func.__name__}{signature}")
    return original(self, signature, context)

KernelCache.load_overload = recorded

def run(*arguments, text=""):
    done = transduce(*arguments, folder=folder, text=text)
    assert done.returncode == 0, done
    return done.stdout

assert "kept in" in run("warm-up")
assert len(asked) > 10
first = len(asked)
assert "everything was compiled before" in run("warm-up")
assert len(asked) == first, "a second call needs other kernels"
train_small_runs(folder, "transducer", "ctc", "prediction", epochs=2)
lines = "\\n".join(WORDS * 30)
run("transcribe", "runs/transducer", text=lines)
run("transcribe", "runs/transducer", "--timestamps", text=lines)
run("transcribe", "runs/transducer", "--n-best", "2", text=lines)
run("transcribe", "runs/ctc", "--beam-width", "3", text=lines)
run("evaluate", "runs/transducer", "--beam-width", "4")
run("evaluate", "runs/transducer", "runs/transducer")
run("graphones", "transducer.toml", "--output", "joint.safetensors")
run("evaluate", "runs/transducer", "joint.safetensors", "pairs.tsv", "--beam-width", "4")
run("phonemize", text="\\n".join(["transducer", "networks"] * 300))
run("phonemize", "--n-best", "3", text="\\n".join(["transducer", "networks"] * 300))
soundfile.write(folder / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 16000), 16000)
run("recognize", "noise.wav")
run("recognize", "noise.wav", "--beam-width", "1", "--format", "textgrid")
assert asked[first:] == [], asked[first:]
"""


@pytest.mark.slow
def test_after_a_warm_up_other_commands_need_no_further_kernels(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        cwd=Path(__file__).parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
