"""The CPU backend of the output lattice, compiled by Numba (Eqs. 12-22)."""

from transduce.lattice.cpu.additive import (
    additive_backward,
    additive_forward,
    additive_saved,
    lattice_transitions,
)
from transduce.lattice.cpu.arrows import lattice_forward
from transduce.lattice.cpu.distillation import distillation_forward
from transduce.lattice.cpu.emissions import label_emissions
from transduce.lattice.cpu.joint import joint_backward, joint_forward, joint_saved
from transduce.lattice.cpu.parts import (
    backward_variables,
    best_alignment,
    forward_variables,
    log_occupancy,
)

__all__ = [
    "additive_backward",
    "additive_forward",
    "additive_saved",
    "backward_variables",
    "best_alignment",
    "distillation_forward",
    "forward_variables",
    "joint_backward",
    "joint_forward",
    "joint_saved",
    "label_emissions",
    "lattice_forward",
    "lattice_transitions",
    "log_occupancy",
]
