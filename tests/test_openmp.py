"""PyTorch's threads, and one of them alone."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import transduce
from transduce.kernels.openmp import one_thread, openmp

pytestmark = pytest.mark.skipif(openmp() is None, reason="PyTorch is built without GNU OpenMP")


def test_one_thread_computes_alone_and_other_callers_keep_theirs(set_num_threads):
    set_num_threads(2)
    elsewhere = []

    def count():
        torch.set_num_threads(2)
        elsewhere.append(torch.get_num_threads())

    with one_thread():
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=count)
        other.start()
        other.join()
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), elsewhere) == (2, [2])


def test_the_threads_come_back_after_an_error(set_num_threads):
    set_num_threads(2)
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("beam_width", [1, 10])
def test_a_few_words_are_searched_in_one_thread(beam_width, set_num_threads, monkeypatch):
    set_num_threads(2)
    model, seen = transduce.load("english-pronouncer"), []
    search = type(model.network).search

    def noted(*arguments, **options):
        seen.append((torch.get_num_threads(), options["backend"]))
        return search(*arguments, **options)

    monkeypatch.setattr(type(model.network), "search", noted)
    model(["one", "two"], beam_width=beam_width)
    assert seen == [(1, "eager")]
    model(["three"] * 1984, beam_width=beam_width)
    assert seen[-1] == (2, "auto")


PAUSES = """
import os, time
import transduce, torch

numbers = torch.zeros(1_000_000)
for _ in range(20):
    numbers.add_(1.0)
start = time.process_time()
for _ in range(40):
    numbers[:100_000].add_(1.0)
    time.sleep(0.02)
print(os.environ["GOMP_SPINCOUNT"], (time.process_time() - start) / 40)
"""


@pytest.mark.parametrize("asked", [None, "300000"])
@pytest.mark.slow
def test_threads_that_wait_sleep_soon_unless_the_environment_says_otherwise(asked):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    root = Path(__file__).parent.parent
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(root)}
    environment |= {"GOMP_SPINCOUNT": asked} if asked else {}
    command = [sys.executable, "-c", PAUSES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rounds, seconds = done.stdout.split()
    assert rounds == (asked or "5000")
    if asked is None:  # 300,000 rounds take 2 to 15 ms
        assert float(seconds) < 1e-3
