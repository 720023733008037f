"""Choosing strategies: candidates, their prices, and the plan that takes least time. No process group is needed."""
