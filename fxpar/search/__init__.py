"""Choosing strategies: candidates, their prices, and the set that takes least time. No process group is needed."""
