"""What the CPU kernels share: PyTorch's threads, functions and products that fill vectors.

Numba leaves three things to be wished for. Its threads fight with PyTorch's. Its scalar exp, log
and tanh are calls, so a loop around them does not vectorise. And a loop that multiplies matrices
keeps its sums in memory.
"""
