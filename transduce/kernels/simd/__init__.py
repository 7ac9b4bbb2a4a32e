"""Numba helpers of the CPU kernels: threads, vectorised functions, matrix products.

They replace three weak points of Numba. Its threads compete with PyTorch's for the cores. Its
scalar exp, log and tanh are calls, so that a loop around them does not vectorise. A loop that
multiplies matrices keeps its sums in memory instead of registers.
"""
