"""One loop that trains any of the networks."""
