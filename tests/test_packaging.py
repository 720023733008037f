"""`fxpar.passes` and `fxpar.recipes` import in every way in which somebody may get hold of fxpar.

The two folders stand at the top of the repository. Links inside `fxpar/` serve a checkout that is
not installed, the `package-dir` map of pyproject.toml serves everything that is built. All builds
are made in a copy, so that the checkout stays clean. Each import is tried in a fresh interpreter
with `-S`, which hides whatever version of fxpar the running environment has installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "recipes")

pytestmark = pytest.mark.packaging

PROBE = """
import importlib.util, json, site, sys
for folder in {sites!r}:
    site.addsitedir(folder)  # reads .pth files, as installing there would
sys.path += {dependencies!r}
import fxpar, fxpar.passes, fxpar.recipes
print(json.dumps({{
    "version": fxpar.__version__,
    "files": {{m.__name__: m.__file__ for m in (fxpar, fxpar.passes, fxpar.recipes)}},
    "leaks": [n for n in ("passes", "recipes", "tests") if importlib.util.find_spec(n)],
    "new": importlib.util.find_spec("fxpar.passes.new_file") is not None,
}}))
"""


def run_python(code: str, cwd: Path, site_packages: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, without PYTHON* variables and by default without site."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *([] if site_packages else ["-S"]), "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def probe(cwd: Path, sites: tuple[Path, ...] = ()) -> dict:
    """Import fxpar and both folders with `sites` installed; report files and leaked names."""
    dependencies = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    code = PROBE.format(sites=[str(path) for path in sites], dependencies=dependencies)
    done = run_python(code, cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def build(source: Path, kind: str, out: Path) -> Path:
    """Call the build backend as pip and `python -m build` do: no network, no build isolation."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = run_python(code, source, site_packages=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (artifact,) = out.iterdir()
    return artifact


def copy_checkout(target: Path, links: bool) -> Path:
    """Copy what a build reads. Without `links`, as git checks out where the system has none."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("fxpar", *LINKED):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
    if not links:
        for name in LINKED:
            (target / "fxpar" / name).unlink()
            (target / "fxpar" / name).write_text(f"../{name}")
    return target


def package_files(base: Path) -> set[str]:
    """Names that the .py files of the checkout at `base` should have in a wheel."""
    names = set()
    for folder, prefix in (("fxpar", ""), ("passes", "fxpar/"), ("recipes", "fxpar/")):
        for directory, _, files in os.walk(base / folder):  # does not follow links
            relative = Path(directory).relative_to(base).as_posix()
            names |= {f"{prefix}{relative}/{file}" for file in files if file.endswith(".py")}
    return names


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def checkout(workshop: Path) -> Path:
    return copy_checkout(workshop / "checkout", links=True)


@pytest.fixture(scope="module")
def wheel(checkout: Path, workshop: Path) -> Path:
    return build(checkout, "wheel", workshop / "wheel")


def wheel_names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_links_are_relative_and_point_to_the_real_folders():
    for name in LINKED:
        link = ROOT / "fxpar" / name
        assert link.is_symlink(), f"fxpar/{name} is not a link (git config core.symlinks true?)"
        assert os.readlink(link) == f"../{name}"
        assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_imports_from_the_root_without_installation():
    found = probe(ROOT)["files"]
    assert {name: Path(file) for name, file in found.items()} == {
        "fxpar": ROOT / "fxpar" / "__init__.py",
        "fxpar.passes": ROOT / "fxpar" / "passes" / "__init__.py",
        "fxpar.recipes": ROOT / "fxpar" / "recipes" / "__init__.py",
    }


@pytest.mark.parametrize("name", LINKED)
def test_top_level_import_is_refused_with_advice(name):
    done = run_python(f"import {name}", ROOT)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert f"write `import fxpar.{name}`" in done.stderr


@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
def test_editable_installation(links, workshop):
    source = copy_checkout(workshop / f"editable_{links}", links)
    site = workshop / f"editable_site_{links}"
    built = build(source, "editable", workshop / f"editable_wheel_{links}")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    (source / "passes" / "new_file.py").write_text("")
    found = probe(workshop, (site,))
    assert found["leaks"] == []
    assert found["new"], "a pass written after the installation is not seen"
    for name, file in found["files"].items():
        assert Path(file).resolve().is_relative_to(source), name


def test_wheel_holds_the_package_and_nothing_else(wheel, checkout):
    names = wheel_names(wheel)
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fxpar"}
    assert {name for name in names if name.endswith(".py")} == package_files(checkout)
    assert "fxpar/py.typed" in names


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n)
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        licences = [n for n in archive.namelist() if n.endswith("/LICENSE")]
    assert metadata["Name"] == "fxpar"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert licences
    assert "fxpar = fxpar.cli:main" in scripts


def test_wheel_is_the_same_where_links_are_text_files(wheel, workshop):
    source = copy_checkout(workshop / "linkless", links=False)
    assert wheel_names(build(source, "wheel", workshop / "linkless_wheel")) == wheel_names(wheel)


def test_wheel_from_the_source_distribution_is_the_same(wheel, checkout, workshop):
    sdist = build(checkout, "sdist", workshop / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extractall(workshop / "unpacked", filter="data")
    (source,) = (workshop / "unpacked").iterdir()
    again = build(source, "wheel", workshop / "sdist_wheel")
    assert wheel_names(again) == wheel_names(wheel)


def test_installed_wheel_imports_and_leaks_no_name(wheel, workshop):
    site = workshop / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command = [*pip, "--no-compile", "--target", str(site), str(wheel)]
    done = subprocess.run(command, cwd=workshop, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = probe(workshop, (site,))
    assert found["leaks"] == []
    assert found["version"] == wheel.name.split("-")[1]
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(site), name
