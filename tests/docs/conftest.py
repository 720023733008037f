"""The example package, installed for the tests of a file that ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.docs.extras import install


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("installed")
    install(folder)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
