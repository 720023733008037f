"""Sharding rules: which cuts of an op are legal, as a table of small functions."""
