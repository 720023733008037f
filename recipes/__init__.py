"""Ready configurations for training frameworks. This folder imports as `fxpar.recipes`.

A recipe is a function that returns a complete configuration of its host framework. The library
itself imports nothing from here, so a host framework is needed only by those who use its recipe.
Import absolutely in this folder (`from fxpar.api import ...`), and keep it flat.
"""

if __name__ != "fxpar.recipes":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which makes a second copy of every recipe; "
        "write `import fxpar.recipes` (or `from fxpar.recipes import ...`) instead"
    )
