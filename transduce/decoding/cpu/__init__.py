"""Both searches on the CPU, compiled by Numba."""

from transduce.decoding.cpu.beam import beam_searches
from transduce.decoding.cpu.greedy import greedy_searches

__all__ = ["beam_searches", "greedy_searches"]
