"""Analysis of a transducer: when and why it emits each label (section 3.4 of the paper)."""

from transduce.analysis.lattice import (
    Arrow,
    Bar,
    Bars,
    LatticeView,
    Node,
    arrows,
    output_bars,
    transducer_of,
    view_lattice,
)
from transduce.analysis.sensitivity import Sensitivity, sensitivity

__all__ = [
    "Arrow",
    "Bar",
    "Bars",
    "LatticeView",
    "Node",
    "Sensitivity",
    "arrows",
    "output_bars",
    "sensitivity",
    "transducer_of",
    "view_lattice",
]
