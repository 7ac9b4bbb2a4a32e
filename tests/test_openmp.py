"""PyTorch's threads, and one of them alone."""

import threading

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
