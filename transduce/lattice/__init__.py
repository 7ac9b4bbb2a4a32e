"""The output lattice: its parts, its likelihood, its gradients (Eqs. 12-22)."""
