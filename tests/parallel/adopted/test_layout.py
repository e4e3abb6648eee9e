# SPDX-License-Identifier: Apache-2.0
"""The data shards and the averages that follow from the meshes of a model, without processes."""

import pytest

from accelerate.core.errors import PrepareError
from accelerate.parallel.adopted.sharing import Description, Sharing, derive


def of(ranks, *kinds):
    """Descriptions of a run whose parameters `p0`, `p1`, ... are shared as `kinds` say for a rank."""
    return [
        Description(
            tuple((f"p{number}", Sharing(*kind(rank))) for number, kind in enumerate(kinds))
        )
        for rank in range(ranks)
    ]


def along(stride, size):
    """The ranks of a mesh dimension that are `stride` apart."""

    def group(rank):
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + stride * size, stride))

    return group


def plain(rank):
    return ()


def sizes(layout):
    """The number of ranks that average each kind of parameter."""
    return [max(map(len, groups)) for groups in layout.averages]


def test_experts_over_ranks_with_different_samples():
    """8 ranks: fsdp 4 x tp 2 for dense layers, 2 copies of 4 groups of experts."""
    layout = derive(
        of(
            8,
            lambda rank: ((along(2, 4)(rank),), (along(1, 2)(rank),)),
            lambda rank: ((along(4, 2)(rank),), (along(1, 4)(rank),), 4.0),
            plain,
        )
    )
    assert layout.shards == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert sizes(layout) == [1, 1, 4]
    assert set(layout.averages[2]) == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_what_no_mesh_covers_is_replicated():
    outer = derive(of(4, lambda rank: ((), (along(2, 2)(rank),)), plain))
    assert outer.shards == ((0, 2), (1, 3)) and sizes(outer) == [2, 2]
    assert set(outer.averages[0]) == {(0, 1), (2, 3)}
    slices = derive(of(4, lambda rank: ((along(1, 2)(rank),),), plain))
    assert slices.shards == ((0,), (1,), (2,), (3,)) and sizes(slices) == [2, 4]
    assert set(slices.averages[0]) == {(0, 2), (1, 3)}


REFUSED = {
    "unequal": (
        of(4, lambda rank: ((), ((0, 1),) if rank < 2 else ())),
        r"unrelated: .*\[\(0, 1\), \(2,\), \(3,\)\]",
    ),
    "crossed": (of(4, lambda rank: ((), ((0, 3),) if rank in (0, 3) else ((1, 2),))), "unrelated"),
    "experts without a divisor": (
        of(2, lambda rank: (((0, 1),),), lambda rank: ((), ((0, 1),))),
        r"the gradient of p1 would not be an average: .* 2 of the 2 shards .* divided by 1",
    ),
    "a sum": (
        of(2, lambda rank: (((0, 1),), (), 1.0)),
        r"gradient of p0 .*set_gradient_divide_factor\(2\)",
    ),
    "stages": ([*of(1, plain), *of(1, plain, plain)], "the ranks have different parameters"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    descriptions, text = REFUSED[what]
    with pytest.raises(PrepareError, match=text):
        derive(descriptions)
