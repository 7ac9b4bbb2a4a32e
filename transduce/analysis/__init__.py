"""Why an output was emitted, and when: the paper's Analysis section."""

from transduce.analysis.lattice import Bar, Bars, LatticeView, output_bars, view_lattice
from transduce.analysis.sensitivity import Sensitivity, sensitivity

__all__ = [
    "Bar",
    "Bars",
    "LatticeView",
    "Sensitivity",
    "output_bars",
    "sensitivity",
    "view_lattice",
]
