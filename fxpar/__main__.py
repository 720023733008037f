"""`python -m fxpar`: the command line."""

from __future__ import annotations

from fxpar.cli import main

if __name__ == "__main__":
    main()
