"""Long Short-Term Memory with peepholes (Eqs. 4-8)."""
