"""What is loaded equals what was saved, bit for bit, on other numbers of ranks and with other implementations."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fxpar.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fxpar.runtime.forked import run_forked
from tests import warm  # noqa: F401
from tests.checkpoint.small import assert_same, make, step, whole


@pytest.mark.parametrize("fused", [False, True])
def test_other_numbers_of_ranks(tmp_path, fused):
    def first(rank):
        model, optimizer = make(4, fused=fused, foreach=not fused)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        optimizer.param_groups[0]["lr"] = 0.03
        path = save_checkpoint(tmp_path, 2, model, optimizer, {"loader": {"position": (3, rank * 0)}})
        return str(path), whole(model, optimizer)

    def again(world):
        def work(rank):
            model, optimizer = make(world, seed=9, fused=not fused, foreach=fused)
            extra = load_checkpoint(latest_checkpoint(tmp_path), model, optimizer)
            save_checkpoint(tmp_path, 2, model, optimizer, extra)
            return extra, whole(model, optimizer), [dict(g, params=0) for g in optimizer.param_groups]

        return work

    results = run_forked(4, first, 60)
    assert {path for path, _ in results} == {str(tmp_path / "step-00000002")}
    saved = results[0][1]
    assert any(name.endswith("/exp_avg_sq") for name in saved)
    assert not any(name.startswith(("unused/", "frozen/")) for name in saved)
    for world in (2, 3, 1):
        loaded = run_forked(world, again(world), 60) if world > 1 else [again(1)(0)]
        for extra, tensors, groups in loaded:
            assert extra == {"loader": {"position": (3, 0)}}
            assert_same(tensors, saved)
            assert [(g["lr"], g["weight_decay"], g["fused"]) for g in groups] == [
                (0.03, 0.5, not fused),
                (0.1, 0.0, not fused),
            ]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_goes_on_as_if_nothing_had_happened(tmp_path, steps_before):
    """Also before the first step, where the optimizer has no state yet."""

    def scheduled(seed):
        model, optimizer = make(1, seed=seed)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.3)

    def go_on(model, optimizer, scheduler, steps):
        for i in steps:
            step(model, optimizer, i)
            scheduler.step()

    whole_run = scheduled(0)
    go_on(*whole_run, range(5))
    model, optimizer, scheduler = scheduled(0)
    go_on(model, optimizer, scheduler, range(steps_before))
    before = whole(model, optimizer)
    path = save_checkpoint(tmp_path, steps_before, model, optimizer, {"scheduler": scheduler.state_dict()})
    assert_same(whole(model, optimizer), before)
    resumed = scheduled(5)
    step(resumed[0], resumed[1], 77)  # a state that must go
    resumed[2].load_state_dict(load_checkpoint(path, resumed[0], resumed[1])["scheduler"])
    go_on(*resumed, range(steps_before, 5))
    assert_same(whole(*resumed[:2]), whole(*whole_run[:2]))


def test_tied_weights_are_stored_once_and_found_under_either_name(tmp_path):
    model, optimizer = make(1)
    step(model, optimizer, 1)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert "model.embed.weight" in keys
    assert "model.head.weight" not in keys
    other, other_optimizer = make(1, seed=3)
    head = other.head
    del other.head, other.embed  # now the head comes first
    other.head = head
    other.embed = torch.nn.Embedding(11, 6)
    other.embed.weight = head.weight
    load_checkpoint(path, other, other_optimizer)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(
        other_optimizer.state[other.head.weight]["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"]
    )


def test_compiled_model(tmp_path):
    model, optimizer = make(1)
    path = save_checkpoint(tmp_path, 1, torch.compile(model), optimizer, {})
    other, other_optimizer = make(1, seed=3)
    load_checkpoint(path, other, other_optimizer)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))


def test_model_alone(tmp_path):
    model, optimizer = make(1)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {"a": 1})
    other, _ = make(1, seed=3)
    assert load_checkpoint(path, other, None) == {"a": 1}
    assert torch.equal(other.gain, model.gain)


def test_torch_reads_it_on_its_own(tmp_path):
    """An independent oracle: torch's loader and `set_state_dict`, on sharded parameters."""

    def work(rank):
        def same_for_all(seed):
            model, optimizer = make(2, seed=seed)
            for parameter in (model.unused, model.frozen):
                parameter.requires_grad_(False)  # torch's own way wants a state for each other parameter
            return model, optimizer

        model, optimizer = same_for_all(0)
        step(model, optimizer, 1)
        path = save_checkpoint(tmp_path, 1, model, optimizer, {})
        other, other_optimizer = same_for_all(3)
        model_dict, optimizer_dict = get_state_dict(other, other_optimizer)
        model_dict.pop("head.weight")
        dcp.load({"model": model_dict, "optimizer": {"state": optimizer_dict["state"]}}, checkpoint_id=path)
        model_dict["head.weight"] = model_dict["embed.weight"]
        set_state_dict(other, other_optimizer, model_state_dict=model_dict, optim_state_dict=optimizer_dict)
        return whole(model, optimizer), whole(other, other_optimizer)

    assert_same(*run_forked(2, work, 60)[1])
