"""What tells mini-batches apart: every value, dtype and shape, whatever the memory looks like."""

from __future__ import annotations

import itertools

import torch

from fxpar.runtime.agree import digest

IDS = torch.arange(6)


def test_equal_values_have_equal_digests_in_any_memory():
    columns = torch.stack([IDS, IDS + 50], 1)
    assert digest([columns[:, 0]]) == digest([IDS]) == digest([{"input_ids": IDS}])
    # One element is contiguous with any stride.
    assert digest([columns[:1, 0], IDS]) == digest([IDS[:1], IDS])
    assert digest([{"w": torch.randn(4, 1, 3).expand(4, 2, 3)[:1, 0, :1] * 0}]) == digest([{"w": torch.zeros(1, 1)}])


def test_whatever_differs_is_told_apart():
    given = [
        [IDS],
        [IDS, IDS],
        [IDS.flip(0)],
        [IDS.int()],
        [IDS.view(2, 3)],
        [{"tokens": IDS}],
        [IDS.to("meta")],
        [IDS.float().to_sparse()],
        [IDS.tolist()],
        [None],
        [],
        None,
        IDS,
        iter([IDS]),
    ]
    found = [digest(one) for one in given]
    for (i, a), (j, b) in itertools.combinations(enumerate(found), 2):
        assert a != b, (given[i], given[j])
