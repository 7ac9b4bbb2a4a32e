"""Joint n-gram models of letters and sounds, which score the outputs of transducers."""
