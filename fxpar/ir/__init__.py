"""The nouns: meshes, placements, strategies, graphs and programs, what a pass is, and how all of them are printed.

Nothing here needs a process group, and nothing here imports another room of fxpar.
"""

from __future__ import annotations
