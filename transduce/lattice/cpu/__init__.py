"""The output lattice on the CPU, compiled by Numba (Eqs. 12-22)."""

from transduce.lattice.cpu.additive import (
    additive_backward,
    additive_forward,
    lattice_transitions,
)
from transduce.lattice.cpu.joint import joint_backward, joint_forward
from transduce.lattice.cpu.parts import (
    backward_variables,
    best_alignment,
    forward_variables,
    log_occupancy,
)

__all__ = [
    "additive_backward",
    "additive_forward",
    "backward_variables",
    "best_alignment",
    "forward_variables",
    "joint_backward",
    "joint_forward",
    "lattice_transitions",
    "log_occupancy",
]
