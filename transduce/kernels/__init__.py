"""The foundations of the backends: their choice, helpers for Numba, and NVRTC."""
