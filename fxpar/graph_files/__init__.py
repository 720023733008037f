"""Graphs as files that run no code when they are read: the format, its vocabulary, and what is allowed in it."""

from __future__ import annotations

from fxpar.graph_files.file import Origin, SavedGraph, kind_of, load_graph, load_origin, save_graph

__all__ = ["Origin", "SavedGraph", "kind_of", "load_graph", "load_origin", "save_graph"]
