"""What all tests share: one thread, seeds, no process group left behind, GPU tests skipped."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

# Before anything imports torch: several workers share few cores, and sums must not depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Caches of captures, tokenizers and tokens: one folder per run, shared by its workers, never the user's.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fxpar-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import sys
from collections.abc import Generator, Iterable, Iterator

import pytest
from hypothesis import settings

from tests.longest import LONGEST
from tests.nightly import AT_NIGHT, MEASURED
from tests.repeat import EVERY_RUN, NIGHTLY

# Captures and lowerings make millions of objects that stay: looking through them again and again takes time, a
# twentieth of a file of captures at 100,000.
gc.set_threshold(1_000_000, 50, 50)

# Compiling and tracing make single examples slow, so a deadline would only measure the machine.
settings.register_profile("fxpar", deadline=None, print_blob=True, max_examples=EVERY_RUN)
settings.register_profile("ci", parent=settings.get_profile("fxpar"), derandomize=True)
settings.register_profile("nightly", parent=settings.get_profile("fxpar"), max_examples=NIGHTLY)
settings.load_profile("ci" if os.environ.get("CI") else "fxpar")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main() -> Generator[None, int | None, int | None]:
    """End the process, also a worker's, when pytest is done: to look through all graphs and modules for garbage and
    to free them one by one takes more than two CPU seconds. A profiler around pytest has something left to do.
    """
    status = yield
    if status is not None and sys.getprofile() is None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is nightly. Put the longest files first. Skip the tests marked `gpu` where torch sees no CUDA GPU."""
    measured = () if config.getoption("--anew", default=False) else MEASURED.read_text().split("\n")
    _mark_nightly(items, measured, whole_files=not any("::" in arg for arg in config.args))
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))


def _mark_nightly(items: list[pytest.Item], measured: Iterable[str], whole_files: bool) -> None:
    """By `tests/nightly.py` and tests/nightly.txt; where files were collected whole, a name of no test is an error."""
    nightly = {f"{file}::{name}" for file, names in AT_NIGHT.items() for name in names}.union(filter(None, measured))
    ids = [item.nodeid.removeprefix("tests/") for item in items]
    files = {name.partition("::")[0] for name in ids}
    left = {name for name in nightly if name.partition("::")[0] in files}
    for item, case in zip(items, ids, strict=True):
        for name in nightly.intersection({case, case.partition("[")[0]}):
            item.add_marker(pytest.mark.nightly)
            left.discard(name)
    if left and whole_files:
        raise pytest.UsageError(f"tests/nightly.py or tests/nightly.txt names what is no test: {sorted(left)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules stay until the end: nothing looks through their objects again, in tests that collect garbage neither."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times when it ends, to find errors in what nobody holds: graphs are not among it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def own_world() -> Iterator[None]:
    """Seed torch before each test; fail a test that leaves a default process group behind.

    A group that was there before the test (from a fixture of a wider scope) is left alone. Tests
    that never import torch do not import it here.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` keeps the stack of each of its callers for the day that CUDA is initialized: milliseconds.
        (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(0)
    before = _has_process_group()
    yield
    if _has_process_group() and not before:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test left a default process group; destroy it in the test or its fixture")


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
