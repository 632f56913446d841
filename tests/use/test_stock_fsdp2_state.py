"""State dicts of FSDP2 around a grid, and models made on meta, as torch's own tests have them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from support import world
from support.device import DEVICE
from support.fsdp import NAMES, PLANS, SHAPES, TOLERANCE, VOCAB, Differences, Pair, Shape, shard
from support.marks import deep
from support.models import parallelize, relative, transformer
from support.one_module import no_difference


def _from_meta(shape: Shape, tied: bool) -> Differences:
    """Made on no device, then put on one, initialised there, and given rank 0's weights."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=NAMES[3])
    with torch.device("meta"):
        model = transformer(VOCAB, weight_tying=tied)
    parallelize(model, mesh["tp_row", "tp_col"], PLANS["2d"]())
    shard(model, mesh["dp"], "blocks")
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    if tied:
        model.output.weight = model.tok_embeddings.weight
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, param in model.named_parameters():
        whole = param.full_tensor()
        assert whole.isfinite().all() and whole.any() == (not name.endswith("norm.bias")), name
        if "feed_forward.w" in name and whole.ndim == 2:
            # By the features of the whole weight, not of a shard.
            bound = whole.shape[1] ** -0.5
            assert bound / 2 < whole.abs().max() <= bound, name
    pair = Pair(shape)
    pair.alone = transformer(VOCAB, weight_tying=tied)
    pair.ours = model
    given = pair.alone.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    pair.optimizers = [pair.optimizer(part) for part in (pair.alone, model)]
    return {f"tied {tied}": pair.train(0, 1)}


@pytest.mark.parametrize("shape,tied", [deep(SHAPES[0], False), deep(SHAPES[1], True)])
def test_made_on_meta(shape: Shape, tied: bool) -> None:
    no_difference(world.run(4, _from_meta, shape, tied), TOLERANCE)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two sharded state dicts hold the same bits, laid out alike."""
    for key, value in a.items():
        other = b[key]
        if isinstance(value, dict):
            if not _same(value, other):
                return False
        elif isinstance(value, DTensor):
            if (value.device_mesh, value.placements) != (other.device_mesh, other.placements):
                return False
            if not torch.equal(value.to_local(), other.to_local()):
                return False
        elif isinstance(value, Tensor):
            if not torch.equal(value, other):
                return False
        elif value != other:
            return False
    return set(a) == set(b)


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else copy.deepcopy(state)


def _state_dicts(shape: Shape, plan: str) -> Differences:
    seen = {}
    pair = Pair(shape, plan, reshard_after_forward=False)
    seen["trained"] = pair.train(0)
    model, optimizer = pair.ours, pair.optimizers[1]

    # Sharded: views of the parameters, on the mesh of all axes.
    pointers = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    state = model.state_dict()
    assert list(state) == list(pair.alone.state_dict())
    for name, pointer in pointers.items():
        assert state[name].device_mesh == pair.mesh
        assert state[name].placements[-2:] == pair.placed[name]
        assert state[name].to_local().data_ptr() == pointer
    seen["sharded"] = max(relative(state[n], w) for n, w in pair.alone.state_dict().items())
    before = _copied(state)
    pair.losses(1)
    assert _same(before, model.state_dict()), "a forward had left the parameters gathered"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict({name: torch.full_like(value, 7.0) for name, value in state.items()})
    assert all((param.to_local() == 7).all() for param in model.parameters())
    model.load_state_dict(torch.load(file, weights_only=False))
    assert _same(before, model.state_dict())

    # Whole: on rank 0, and from there.
    kept = _copied(get_optimizer_state_dict(model, optimizer))["state"]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # On a CPU what is whole already is the parameter itself.
    whole = _copied(get_model_state_dict(model, options=options))
    of_optimizer = _copied(get_optimizer_state_dict(model, optimizer, options=options))
    if dist.get_rank():
        assert not whole and not of_optimizer
    else:
        wanted = get_optimizer_state_dict(pair.alone, pair.optimizers[0])["state"]
        seen["whole"] = max(relative(whole[n], w) for n, w in pair.alone.state_dict().items())
        seen["whole optimizer"] = max(
            relative(of_optimizer["state"][name][key], value.double())
            for name, values in wanted.items()
            for key, value in values.items()
        )
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer.state.clear()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    set_optimizer_state_dict(model, optimizer, of_optimizer, options=options)
    assert _same(before, model.state_dict())
    assert _same(kept, get_optimizer_state_dict(model, optimizer)["state"])

    # By names alone.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = _copied(get_optimizer_state_dict(model, optimizer, options=options))
    optimizer.state.clear()
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    assert _same(kept, get_optimizer_state_dict(model, optimizer)["state"])
    seen["trained on"] = pair.train(1)
    return seen


@pytest.mark.deep
@pytest.mark.parametrize(
    "shape,plan",
    [
        ((2, 1, 2), "2d"),
        ((2, 2, 1), "stock"),
        ((2, 1, 1, 2), "2d"),
        ((2, 2, 2), "2d"),
        ((2, 2, 2), "stock"),
        ((2, 2, 2, 1), "2d"),
    ],
)
def test_state_dicts(shape: Shape, plan: str) -> None:
    no_difference(world.run(torch.Size(shape).numel(), _state_dicts, shape, plan), TOLERANCE)
