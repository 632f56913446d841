"""The placement rules: pure functions, no processes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_tp2d.mesh.layouts import (
    as_layout,
    chunk_sizes,
    nested_chunk_sizes,
    normalize,
    same_layout,
    same_placement,
)
from torch_tp2d.mesh.routes import steps


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 12, 13, 50257])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_chunk_sizes_are_torch_chunks(size: int, parts: int) -> None:
    """DTensor shards as torch.chunk does, with empty shards where chunk makes none."""
    chunks = [len(chunk) for chunk in torch.empty(size).chunk(parts)] if size else []
    assert chunk_sizes(size, parts) == tuple(chunks + [0] * (parts - len(chunks)))
    assert sum(chunk_sizes(size, parts)) == size


def test_nested_chunks_are_not_a_flat_chunk() -> None:
    assert nested_chunk_sizes(10, (2, 2)) == (3, 2, 3, 2)
    assert chunk_sizes(10, 4) == (3, 3, 3, 1)


def test_a_single_placement_is_the_tp_col_layout() -> None:
    default = (Shard(0), Replicate())
    assert as_layout(None, default, row=Shard(0)) == default
    assert as_layout(Shard(1), default, row=Shard(0)) == (Shard(0), Shard(1))
    assert as_layout((Replicate(), Shard(1)), default, row=Shard(0)) == (Replicate(), Shard(1))
    assert as_layout((Shard(1),), default, row=Shard(0)) == (Shard(0), Shard(1))
    with pytest.raises(TypeError, match="one Placement"):
        as_layout("Shard(1)", default, row=Shard(0))
    with pytest.raises(TypeError, match="one Placement"):
        as_layout((Shard(0), Shard(1), Shard(2)), default, row=Shard(0))


def test_normalize_counts_dims_from_the_front() -> None:
    assert normalize((Shard(0), Shard(-1)), 3) == (Shard(0), Shard(2))
    with pytest.raises(ValueError, match="shards dim 2 of a 2-dim tensor"):
        normalize((Shard(0), Shard(2)), 2)


def test_placements_are_the_same_as_torch_says() -> None:
    """All pairs, of kinds and of dims; torch takes long to tell two kinds apart."""
    of_all_kinds = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]
    copies = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]
    for a in of_all_kinds:
        for b in copies:
            assert same_placement(a, b) == (a == b)
            assert same_layout((a, Shard(1)), (b, Shard(1))) == (a == b)
            assert same_layout((Shard(1), a), (Shard(1), b)) == (a == b)


def test_an_inner_shard_is_undone_before_the_outer_one_changes() -> None:
    """tp_col's shard of a dim lies inside tp_row's, so tp_row moves only when it is whole."""
    whole = Replicate()
    taken = steps((Shard(1), Shard(1)), (whole, Shard(1)))
    assert [(after, on_col) for _, after, on_col in taken] == [
        ((Shard(1), whole), 1),
        ((whole, whole), 0),
        ((whole, Shard(1)), 1),
    ]
    taken = steps((Shard(0), Shard(1)), (Shard(1), Shard(1)))
    assert taken[0][1] == (Shard(0), whole)
