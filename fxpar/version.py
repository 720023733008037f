"""The version of fxpar, here and in pyproject.toml."""

__version__ = "0.1.0"
