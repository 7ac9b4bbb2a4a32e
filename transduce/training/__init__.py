"""Recipes, and the loop that trains any of the networks."""
