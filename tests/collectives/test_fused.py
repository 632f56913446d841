"""``fused``: transfers along ``tp_col`` and products in torch's operators, by their CPU reference.

torch has the operators on GPUs only. What is ours, what they are given and what is made of their
results, is the same with the reference implementations that torch tests them by.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from torch import nn

from support import compiled, pipelined, world
from support.async_tp import FusedRecorder, Unfused
from support.marks import deep
from support.models import grid_mesh
from support.symmetric import NAMES, on_cpu
from torch_tp2d import Colwise2D, CommCounter, parallelize_module, token_sizes

TOLERANCE = 1e-12


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "user code reads the gathered input": {"touches": True},
    "weights gathered again": {
        "reshard_after_forward": True,
        "steps": ("recomputed", "stepped", "plain"),
    },
    "inputs gathered again": {
        "regather_input": True,
        "steps": ("plain", "inference", "plain"),
    },
}


def _beside_one_device(rows: int, columns: int, kind: str) -> float:
    on_cpu()
    even, uneven = (rows * 2, columns * 4, 24, 48), (rows + 1, columns * 3 + 1, 10, 14)
    return max(
        pipelined.beside_one_device(rows, columns, sizes, {"algorithm": "fused", **KINDS[kind]})
        for sizes in (even, uneven)
    )


@pytest.mark.parametrize("kind", ["plain", *(deep(kind) for kind in list(KINDS)[1:])])
@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_equals_one_device(rows: int, columns: int, kind: str) -> None:
    for differs in world.run(rows * columns, _beside_one_device, rows, columns, kind):
        assert differs <= TOLERANCE


def _calls(sequence: int) -> tuple[dict[str, int], dict[str, int]]:
    """In a step of a block (q, k and v of one input, an output, a pair): calls, and bytes."""
    on_cpu()
    model, mesh = pipelined.model(24, 48)[:1], grid_mesh(1, 4)
    parallelize_module(model, mesh, pipelined.plan(algorithm="fused"))
    token_sizes(mesh, (2, sequence))
    column = mesh.get_local_rank("tp_col")
    x = pipelined.tokens(2, sequence, 24).chunk(4, 1)[column].clone().requires_grad_()
    with CommCounter(mesh) as counter:
        model(x).sum().backward()
    calls, sizes = (
        {op: value for (axis, op), value in found.items() if axis == "tp_col"}
        for found in (counter.calls, counter.bytes)
    )
    return calls, sizes


def test_what_is_gathered_once_and_summed_once() -> None:
    """q, k and v share a gather and, their products side by side, a sum of gradients.

    Forward gathers for them and for ``w1``, and sums after ``wo`` and ``w2``; backward has as many
    of the other kind. The biases of ``wo`` and ``w2`` are summed beside. A sequence that does not
    divide is not for the operators.
    """
    # The others' three quarters of 2 x 8 x 24 doubles.
    once = 3 * 2 * 2 * 24 * 8
    for calls, sizes in world.run(4, _calls, 8):
        assert calls == {**dict.fromkeys(NAMES, 4), "all_reduce": 2}
        assert {name: sizes[name] for name in NAMES} == dict.fromkeys(NAMES, 4 * once)
    for calls, _ in world.run(4, _calls, 11):
        assert not any(name in calls for name in NAMES) and calls


def _compiled(*args: Any, **options: Any) -> tuple[float, list[Counter[str]]]:
    on_cpu()
    return compiled.recorded(2, 2, (4, 8, 24, 48), 1 << 20, *args, **options)


@pytest.mark.deep
def test_in_a_graph() -> None:
    for differs, (forward, backward) in world.run(4, _fused_in_a_graph):
        assert differs <= TOLERANCE
        assert forward["fused_all_gather_matmul"] == 2 == backward["fused_all_gather_matmul"]


def _fused_in_a_graph() -> tuple[float, list[Counter[str]]]:
    return _compiled(algorithm="fused", recorder_of=Unfused)


def _async_tp() -> list[tuple[float, list[Counter[str]]]]:
    os.environ["TP2D_TRANSPORT"] = "nccl"
    options = {"algorithm": "pipelined", "recorder_of": FusedRecorder}
    return [_compiled(**options), _compiled(biases=False, **options)]


@pytest.mark.deep
def test_inductors_async_tp_finds_the_products() -> None:
    """It found none: activations were gathered flat, and permuted before they were summed.

    Forward gathers for q, k and v and for ``w1``, and sums after ``wo`` and ``w2``, where a bias
    that is added before stands between. Backward gathers for these two; the sums over columns are
    of several products, those over rows of the gradient of one weight each.
    """
    for (differs, graphs), (differs_too, without_biases) in world.run(4, _async_tp):
        assert max(differs, differs_too) <= TOLERANCE
        assert [graph["fused_all_gather_matmul"] for graph in graphs] == [2, 2]
        forward, backward = without_biases
        assert forward["fused_all_gather_matmul"] == backward["fused_all_gather_matmul"] == 2
        assert forward["fused_matmul_reduce_scatter"] == 2
        assert backward["fused_matmul_reduce_scatter"] == 6


def _refused() -> str:
    with pytest.raises(ValueError) as error:
        parallelize_module(nn.Linear(8, 8), grid_mesh(2, 2), Colwise2D(algorithm="fused"))
    return str(error.value)


def test_a_device_without_the_operators() -> None:
    for message in world.run(4, _refused, fresh=True):
        assert 'torch has no operators on cpu: use algorithm="pipelined"' in message
