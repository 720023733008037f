"""The registry of passes: lookup by name, plugins, errors, and the graph_trainer adaptor."""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import fx

from fxpar.errors import DuplicateNameError, EntryLoadError, PassContractError, UnknownPassError
from fxpar.ir import pass_registry

# Any importable attributes will do: the registry does not look into what it finds.
FAKE_BUILTIN = {"bucket_collectives": "operator:add", "insert_reshards": "collections:OrderedDict"}


@pytest.fixture(autouse=True)
def fake_builtin(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    table = dict(FAKE_BUILTIN)
    monkeypatch.setattr(pass_registry, "PASSES", replace(pass_registry.PASSES, builtin=table))
    return table


class PluginSite:
    """A folder on sys.path into which packages with entry points can be installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, entries: dict[str, str], source: str = "") -> None:
        (self.folder / f"{package}.py").write_text(source)
        info = self.folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[fxpar.passes]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    monkeypatch.syspath_prepend(tmp_path)
    yield PluginSite(tmp_path)
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


def test_builtin_passes_are_found_and_sorted():
    assert pass_registry.available() == ("bucket_collectives", "insert_reshards")
    assert pass_registry.get("bucket_collectives") is operator.add


def test_plugin_is_found_without_being_imported(site):
    site.install("plug_ok", {"my_pass": "plug_ok:MyPass"}, "class MyPass: pass\n")
    assert "my_pass" in pass_registry.available()
    assert "plug_ok" not in sys.modules
    assert pass_registry.get("my_pass").__name__ == "MyPass"


def test_plugin_installed_later_is_seen(site):
    with pytest.raises(UnknownPassError):
        pass_registry.get("late_pass")
    site.install("plug_late", {"late_pass": "plug_late:run"}, "def run(gm): return False\n")
    assert pass_registry.get("late_pass")(None) is False


def test_unknown_name_gives_the_nearest_ones():
    with pytest.raises(UnknownPassError, match="did you mean 'bucket_collectives'"):
        pass_registry.get("bucket_colectives")


def test_unknown_name_far_from_all_lists_what_there_is():
    with pytest.raises(UnknownPassError) as caught:
        pass_registry.get("zzz")
    assert "did you mean" not in str(caught.value)
    assert "bucket_collectives, insert_reshards" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "source", "cause"),
    [
        ("plug_bad:MyPass", "import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("plug_bad:MyPass", "raise RuntimeError('half installed')\n", "half installed"),
        ("plug_bad:MyPass", "raise SystemExit(3)\n", "SystemExit: 3"),
        ("plug_bad:MyPass", "", "AttributeError"),
        ("plug_bad", "", "no attribute"),
    ],
)
def test_broken_plugin_fails_only_when_asked_for(site, value, source, cause):
    site.install("plug_bad", {"bad_pass": value}, source)
    assert "bad_pass" in pass_registry.available()
    assert pass_registry.get("bucket_collectives") is operator.add
    with pytest.raises(EntryLoadError, match=cause) as caught:
        pass_registry.get("bad_pass")
    assert "the package 'plug_bad'" in str(caught.value)


def test_broken_builtin_names_fxpar(fake_builtin):
    fake_builtin["gone"] = "fxpar.no_such_module:Pass"
    with pytest.raises(EntryLoadError, match="of fxpar cannot be loaded"):
        pass_registry.get("gone")


def test_plugin_cannot_take_the_name_of_a_builtin(site):
    site.install("plug_dup", {"insert_reshards": "plug_dup:Mine"}, "class Mine: pass\n")
    for ask in (pass_registry.available, lambda: pass_registry.get("insert_reshards")):
        with pytest.raises(DuplicateNameError, match=r"fxpar .*'plug_dup' \(plug_dup:Mine\)"):
            ask()


def test_two_plugins_cannot_share_a_name(site):
    site.install("plug_one", {"shared": "plug_one:run"})
    site.install("plug_two", {"shared": "plug_two:run"})
    with pytest.raises(DuplicateNameError, match=r"'plug_(one|two)'.*'plug_(one|two)'"):
        pass_registry.available()


def test_shipped_passes_load(monkeypatch):
    monkeypatch.undo()
    for name in pass_registry.BUILTIN:
        assert callable(pass_registry.get(name)), name


# ---------------------------------------------------------------------------------- the adaptor
def add_then_add(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.add(x, 1), 1)


def double_ones(gm: fx.GraphModule) -> bool:
    """Replaces every `+ 1` by `+ 2`, in place."""
    nodes = [n for n in gm.graph.nodes if n.target is torch.add and n.args[1] == 1]
    for node in nodes:
        node.args = (node.args[0], 2)
    return bool(nodes)


@dataclass(frozen=True)
class AddMore:
    """The same as an object with options, returning a new module."""

    amount: int
    name = "add_more"

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        out = copy.deepcopy(gm)
        for node in out.graph.nodes:
            if node.target is torch.add:
                node.args = (node.args[0], self.amount)
        return out


@pytest.fixture
def gm() -> fx.GraphModule:
    return fx.symbolic_trace(add_then_add)


def test_adaptor_recompiles_a_module_changed_in_place(gm):
    adapted = pass_registry.as_graph_module_pass(double_ones)
    out = adapted(gm, (torch.zeros(2),))
    assert out is gm
    assert out(torch.zeros(1)).item() == 4
    assert adapted.__name__ == "double_ones"
    assert adapted.__doc__ == double_ones.__doc__


def test_adaptor_leaves_an_unchanged_module_alone(gm):
    code = gm.code
    assert pass_registry.as_graph_module_pass(lambda _: False)(gm, ()) is gm
    assert gm.code == code


def test_adaptor_returns_the_module_that_run_made(gm):
    adapted = pass_registry.as_graph_module_pass(AddMore(5))
    out = adapted(gm, (torch.zeros(2),))
    assert out is not gm
    assert out(torch.zeros(1)).item() == 10
    assert adapted.__name__ == "add_more"


def test_adaptor_names_a_partial_after_its_function():
    adapted = pass_registry.as_graph_module_pass(functools.partial(double_ones))
    assert adapted.__name__ == "double_ones"


def test_adaptor_lints_what_a_pass_leaves_behind(gm):
    def break_graph(module: fx.GraphModule) -> bool:
        nodes = list(module.graph.nodes)
        nodes[1].args = (nodes[2], 1)  # uses a node before it is defined
        return True

    with pytest.raises(RuntimeError, match="before it has been defined"):
        pass_registry.as_graph_module_pass(break_graph)(gm, ())


@pytest.mark.parametrize("result", [None, 1, "gm"])
def test_adaptor_refuses_other_results(gm, result):
    adapted = pass_registry.as_graph_module_pass(lambda _: result)
    with pytest.raises(PassContractError, match=f"returned an? {type(result).__name__}"):
        adapted(gm, ())


def test_adaptor_refuses_a_class_and_what_cannot_be_called():
    with pytest.raises(PassContractError, match="make an instance"):
        pass_registry.as_graph_module_pass(AddMore)  # type: ignore[arg-type]
    with pytest.raises(PassContractError, match="cannot be called"):
        pass_registry.as_graph_module_pass(3)  # type: ignore[arg-type]
