"""What runs in `make test-nightly` alone, beside the cases that tests thin out themselves (`tests/repeat.py`).

By file: tests, or single cases, that take long and cover no line of the library that the daily tests of their folder
leave out. What each of them checks stands in a cheaper case of the same test, or in the test that is named behind it.
`tests/conftest.py` marks them, and refuses a name that is none.
"""

from __future__ import annotations

NIGHTLY: dict[str, tuple[str, ...]] = {}
