"""``Norm2D`` and ``Replicate``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed._tensor.common_dtensor import RMSNormPython

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, noise
from support.one_module import (
    FEW,
    LARGE,
    OUTPUTS,
    SOME_INPUTS,
    Conv1D,
    GemmaRMSNorm,
    LlamaRMSNorm,
    compare,
    covering,
    join,
    layout_of,
    no_difference,
    randomized,
    spread,
)
from torch_tp2d import CommCounter, Norm2D, parallelize_module


def _norms() -> list[tuple[str, nn.Module, Callable[[nn.Module, Tensor], Tensor] | None]]:
    """Name, module, and the truth where the module's own forward rounds to fp32."""

    def llama(module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)

    return [
        ("LayerNorm", nn.LayerNorm(11), None),
        ("LayerNorm, large eps", nn.LayerNorm(11, eps=0.1), None),
        ("LayerNorm, no bias", nn.LayerNorm(11, bias=False), None),
        ("LayerNorm, plain", nn.LayerNorm(11, elementwise_affine=False), None),
        ("RMSNorm", nn.RMSNorm(11), None),
        ("RMSNorm, eps", nn.RMSNorm(11, eps=0.01), None),
        ("RMSNorm, plain", nn.RMSNorm(11, elementwise_affine=False), None),
        ("RMSNormPython", RMSNormPython(11, eps=0.01), None),
        ("Llama", LlamaRMSNorm(11, eps=0.01), llama),
        ("Gemma", GemmaRMSNorm(11, eps=0.01), None),
    ]


class _Truth(nn.Module):
    def __init__(self, module: nn.Module, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.module, x)


def _norm_styles(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    norms = _norms()
    worst = {}
    for case in covering(
        {
            "norm": range(len(norms)),
            "given": SOME_INPUTS,
            "out": OUTPUTS,
            "local_output": [True, False],
            "row_dim": [0, 1],
            "size": [(4, 6), (3, 5)],
        }
    ):
        name, module, compute = norms[case["norm"]]
        module = randomized(copy.deepcopy(module))
        kind, given_name = case["given"]
        given, out = (layout_of(part, case["row_dim"]) for part in (given_name, case["out"]))
        found = compare(
            module,
            Norm2D(
                input_layouts=given,
                output_layouts=out,
                use_local_output=case["local_output"],
                row_dim=case["row_dim"],
            ),
            mesh,
            3 + noise(*case["size"], 11, seed=1),
            noise(*case["size"], 11, seed=2),
            given,
            out,
            kind=kind,
            local_output=case["local_output"],
            truth=None if compute is None else _Truth(module, compute),
        )
        worst |= {f"{what}, {name} {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*FEW, *LARGE])
def test_norm2d_equals_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _norm_styles, rows, columns))


def _bf16_norms() -> list[tuple[str, float]]:
    mesh = grid_mesh(2, 2)
    x = (100 + noise(4, 5, 96, seed=1)).to(torch.bfloat16)
    found = []
    for name, module in (
        ("LayerNorm", nn.LayerNorm(96)),
        ("LayerNorm in bf16", nn.LayerNorm(96).to(torch.bfloat16)),
        ("RMSNorm", nn.RMSNorm(96, eps=1e-6)),
        ("RMSNorm in bf16", nn.RMSNorm(96, eps=1e-6).to(torch.bfloat16)),
    ):
        wanted = copy.deepcopy(module).double()(x.double())
        parallelize_module(module, mesh, Norm2D())
        local = spread(x, mesh, (Shard(0), Shard(2))).to_local().requires_grad_()
        y = module(local)
        assert y.dtype == torch.bfloat16
        with CommCounter(mesh) as comm:
            module(local)
        # One or two numbers for each token of this row, in fp32.
        numbers = 2 if "Layer" in name else 1
        assert comm.total_bytes == 2 * 5 * numbers * 4, (name, str(comm))
        y.sum().backward()
        assert local.grad is not None and local.grad.dtype == torch.bfloat16
        assert module.weight.grad.dtype == module.weight.dtype
        worst = (join(y, mesh, (Shard(0), Shard(2)), x.shape).double() - wanted).abs()
        found.append((name, (worst / wanted.abs().clamp(min=1e-2)).max().item()))
    return found


def test_norm2d_keeps_fp32_statistics_of_bf16() -> None:
    """Within bf16's own rounding of the output, 2^-8 (its eps is 2^-7).

    At a mean of 100 bf16 has steps of 0.5, so statistics in bf16 would be off by far more.
    """
    for result in world.run(4, _bf16_norms):
        assert all(worst <= 2**-8 for _, worst in result), result


def _replicated(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    modules: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(7),
        lambda: nn.RMSNorm(7),
        lambda: LlamaRMSNorm(7, eps=0.01).double(),
        lambda: nn.Linear(7, 7),
        lambda: nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7, bias=False)),
    ]
    worst = {}
    for case in covering(
        {
            "module": range(len(modules)),
            "given": [given for given in SOME_INPUTS if given[1] != "whole"],
            "size": [(4, 6), (3, 5)],
            "row_dim": [0, 1],
            "local_output": [None, True, False],
        }
    ):
        kind, name = case["given"]
        if name == "feature" and case["module"] > 0:
            continue  # A hidden dim that is split is not what whole parameters are for.
        if case["module"] > 2 and (name, case["size"], case["row_dim"]) != ("row", (4, 6), 0):
            continue  # See test_a_replicated_linear_takes_uneven_tokens.
        module = randomized(modules[case["module"]]())
        layout = layout_of(name, case["row_dim"])
        local = kind == "local" if case["local_output"] is None else case["local_output"]
        found = compare(
            module,
            torch_tp2d.Replicate(
                input_layouts=layout,
                output_layouts=layout,
                use_local_output=case["local_output"],
                row_dim=case["row_dim"],
            ),
            mesh,
            noise(*case["size"], 7, seed=1),
            noise(*case["size"], 7, seed=2),
            layout,
            layout,
            kind=kind,
            local_output=local,
        )
        # The Llama norm itself rounds to fp32, 6e-8, and does so here as well: 1e-6 is allowed.
        part = 1e-6 if isinstance(module, LlamaRMSNorm) else 1.0
        worst |= {f"{what}, {case}": value * part for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 3), deep(4, 1), deep(2, 3)])
def test_replicate_equals_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _replicated, rows, columns))


def _replicated_linear() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    worst = {}
    makers = {
        "with a bias": lambda: nn.Linear(7, 11),
        "without": lambda: nn.Linear(7, 11, bias=False),
        "Conv1D": lambda: Conv1D(11, 7),
    }
    for name, row_dim, kind in product(("row", "token"), (0, 1), makers):
        layout = layout_of(name, row_dim)
        found = compare(
            randomized(makers[kind]()),
            torch_tp2d.Replicate(input_layouts=layout, row_dim=row_dim),
            mesh,
            noise(3, 5, 7, seed=1),
            noise(3, 5, 11, seed=2),
            layout,
            layout,
        )
        worst |= {f"{what} {name} {row_dim=} {kind}": value for what, value in found.items()}
    return worst


def test_a_replicated_linear_takes_uneven_tokens() -> None:
    """A router: DTensor's own linear refuses tokens that do not divide over the mesh.

    It flattens them, which it also refuses for some token layouts that do divide; as did, of a
    random program, a Conv1D.
    """
    no_difference(world.run(4, _replicated_linear))
