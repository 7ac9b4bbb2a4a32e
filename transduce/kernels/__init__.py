"""What the backends stand on: the choice of one, Numba's helpers, NVRTC."""
