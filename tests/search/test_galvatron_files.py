"""Reading Galvatron's profiles: what is in them, and one error that names file, key and value for each mistake."""

from __future__ import annotations

import json

import pytest

from fxpar.errors import GalvatronFileError, GalvatronKeyError
from fxpar.search.galvatron_files import read_profiles
from tests.search.profiles import shipped, small, write

TIMES = "computation_profiling_bf16_tiny_all.json"
MEMORY = "memory_profiling_bf16_tiny_all.json"
REDUCE = "allreduce_bandwidth_1nodes_2gpus_per_node.json"
P2P = "p2p_bandwidth_1nodes_2gpus_per_node.json"
TABLE = "sp_time_1nodes_2gpus_per_node.json"


def test_the_shipped_profiles():
    found = shipped()
    assert (found.model, found.dtype, found.overlap) == ("llama2-7b", "bf16", 1.125552573612729)
    assert len(found.layer_ms) == len(found.ends_ms) == 12
    assert found.layer_ms[1, 2048] == 4.396252679824831
    memory = found.layer_memory[2048]
    assert (memory.parameter_mb, memory.activation_mb[4], memory.remat_mb) == (778.2236328125, 136.885498046875, 32.0)
    assert found.ends_memory["off"][2048].states_mb[1] == 4130.34765625
    assert found.ends_memory["on_last"][2048].activation_mb[8] == 85.55889892578125
    assert set(found.networks) == {(1, 8), (2, 8)}
    assert found.networks[2, 8].reduce_mb_per_ms[8, False] == 20.7724
    assert found.networks[1, 8].p2p_mb_per_ms == {2: 163.671, 4: 138.581, 8: 109.45}
    assert found.collectives[1, 8].all_to_all_ms[8][64] == 0.3997
    assert found.collectives[1, 8].all_reduce_ms[2][1024] == 5.1594


def test_a_folder_of_several_models(tmp_path):
    files = small()
    for name in (TIMES, MEMORY):
        files[name.replace("tiny", "large")] = files[name]
    write(tmp_path, files)
    with pytest.raises(GalvatronFileError, match=r"profiles of large in bf16, tiny in bf16\. Name one model"):
        read_profiles(tmp_path)
    assert read_profiles(tmp_path, "large").model == "large"


def replaced(name, key, value, *inside):
    def change(files):
        at = files[name]
        for step in inside:
            at = at[step]
        at[key] = value

    return change


def removed(name, key, *inside):
    def change(files):
        at = files[name]
        for step in inside:
            at = at[step]
        del at[key]

    return change


SPOILED = [
    (
        replaced(TIMES, "layertype_0_bsz1_sq64", 1.0),
        [TIMES, "layertype_0_bsz1_sq64", "1.0", "did you mean 'layertype_0_bsz1_seq64'"],
    ),
    (replaced(TIMES, "layertype_0_bsz1_seq64", -1.0), ["layertype_0_bsz1_seq64", "-1.0", "at least 0"]),
    (replaced(TIMES, "layertype_0_bsz1_seq64", "fast"), ["'fast'", "write a number"]),
    (replaced(TIMES, "layertype_0_bsz1_seq64", True), ["True", "write a number"]),
    (replaced(TIMES, "layertype_1_bsz1_seq64", 1.0), ["layertype_1_bsz1_seq64", "several kinds of layers"]),
    (removed(TIMES, "layertype_other_bsz1_seq64"), ["layertype_other_", "no key of this form"]),
    (replaced(MEMORY, "layertype_0_ps", {"64": {}}), [MEMORY, "layertype_0_ps", "did you mean 'layertype_0_sp'"]),
    (replaced(MEMORY, "layertype_1_sp", {"64": {}}), ["layertype_1_sp", "several kinds of layers"]),
    (replaced(MEMORY, "layertype_0_sp", 3), ["layertype_0_sp", "= 3", "write an object"]),
    (replaced(MEMORY, "layertype_0_sp", {}), ["layertype_0_sp", "write an object"]),
    (removed(MEMORY, "other_memory_pp_off_sp"), ["other_memory_pp_off_sp", "it is missing", "did you mean"]),
    (replaced(MEMORY, "long", {}, "layertype_0_sp"), ["layertype_0_sp.long", "sequence lengths"]),
    (replaced(MEMORY, "parameters", 1.0, "layertype_0_sp", "64"), ["layertype_0_sp.64.parameters", "parameter_size'"]),
    (removed(MEMORY, "parameter_size", "layertype_0_sp", "64"), ["layertype_0_sp.64.parameter_size", "missing"]),
    (replaced(MEMORY, "parameter_size", 0, "layertype_0_sp", "64"), ["= 0", "above 0"]),
    (
        removed(MEMORY, "checkpoint", "layertype_0_sp", "64", "tp_activation_per_bsz_dict"),
        ["tp_activation_per_bsz_dict.checkpoint", "with recomputation"],
    ),
    (
        replaced(MEMORY, "two", 1, "other_memory_pp_off_sp", "64", "activation"),
        ["other_memory_pp_off_sp.64.activation.two", "degrees"],
    ),
    (replaced(MEMORY, "peak", 1.0, "1_1_2_c_sp"), ["1_1_2_c_sp.peak", "not known here"]),
    (replaced("overlap_coefficient.json", "overlap_coe", 0.5), ["overlap_coe", "0.5", "at least 1"]),
    (replaced("overlap_coefficient.json", "overlap_coef", 1.5), ["overlap_coef", "did you mean 'overlap_coe'"]),
    (removed("overlap_coefficient.json", "overlap_coe"), ["overlap_coe", "missing"]),
    (replaced(REDUCE, "allreduce_size_2_consec_2", 1.0), [REDUCE, "did you mean 'allreduce_size_2_consec_1'"]),
    (replaced(REDUCE, "allreduce_size_2_consec_1", 0), ["= 0", "above 0"]),
    (replaced(P2P, "pp_deg_2", 1.0), [P2P, "pp_deg_2", "pp_size_2"]),
    (replaced(TABLE, "all2all_size_2_2GB_time", 1.0), [TABLE, "did you mean 'all2all_size_2_2MB_time'"]),
    (removed(TABLE, "all2all_size_2_2MB_time"), ["all2all_size_2_1MB_time", "measure two or more"]),
]


@pytest.mark.parametrize(("change", "words"), SPOILED)
def test_one_error_for_each_mistake_in_a_file(tmp_path, change, words):
    files = small()
    change(files)
    with pytest.raises(GalvatronKeyError) as caught:
        read_profiles(write(tmp_path, files))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", sorted(small()))
def test_a_file_that_is_missing(tmp_path, name):
    """And the nearest name is said, where it was renamed."""
    files = small()
    files[name.replace("_", "-", 1)] = files.pop(name)
    with pytest.raises(
        GalvatronFileError, match=r"there is no .* in it; did you mean '|there is no allreduce"
    ) as caught:
        read_profiles(write(tmp_path, files))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ('{"overlap_coe": 1' + 400 * "0" + "}", "write a number"),
        ('{"overlap_coe": 1e400}', "write a number"),
        ("[1]", "not an object"),
        ('{"overlap_coe": NaN}', "it holds NaN"),
        ('{"overlap_coe": 1.2, "overlap_coe": 1.3}', "stands there twice"),
        ("[" * 100_000, "it is not JSON"),
        ("\udcff", "no UTF-8"),
    ],
)
def test_files_that_are_no_profiles(tmp_path, text, why):
    write(tmp_path, small())
    (tmp_path / "overlap_coefficient.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((GalvatronFileError, GalvatronKeyError), match=why):
        read_profiles(tmp_path)


def test_no_folder(tmp_path):
    for name in ("nowhere", "no\0where"):
        with pytest.raises(GalvatronFileError, match="there is no such folder"):
            read_profiles(tmp_path / name)


def test_profiles_without_sequence_parallelism_are_checked_and_left_alone(tmp_path):
    files = small()
    files[MEMORY]["layertype_0"] = json.loads(json.dumps(files[MEMORY]["layertype_0_sp"]).replace("12.0", "99.0"))
    assert read_profiles(write(tmp_path, files)).layer_memory[64].parameter_mb == 12.0
