"""Whole parameters that see what is whole on ranks which hand back shares of its gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from support.marks import deep
from support.models import RMSNorm, grid_mesh, noise, relative
from support.world import run
from torch_tp2d import (
    Attention2D,
    Local2D,
    Rowwise2D,
    attention_projections,
    parallelize_module,
)

HIDDEN, HEAD, HEADS, KEY_HEADS, VOCAB = 16, 4, 4, 2, 11


class Attention(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, KEY_HEADS, HEAD
        self.q, self.o = nn.Linear(HIDDEN, HEADS * HEAD), nn.Linear(HEADS * HEAD, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, KEY_HEADS * HEAD) for _ in range(2))
        self.k_norm = norm(KEY_HEADS * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for y in (self.q(x), self.k_norm(self.k(x)), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(9, HIDDEN)
        self.position_norm, self.norm = norm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(norm)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_norm(self.positions(torch.arange(ids.shape[1])))
        x = self.embed(ids) + positions
        return x + self.attention(self.norm(x))


def _trained(rows: int, columns: int) -> dict[str, float]:
    mesh, seen = grid_mesh(rows, columns), {}
    stream = {"output_layouts": Shard(1), "use_local_output": True}
    q, kv, o = attention_projections(HEADS, KEY_HEADS, columns, **stream)
    split = KEY_HEADS % columns == 0
    for norm in (RMSNorm, nn.LayerNorm):
        for style in (None, torch_tp2d.Replicate(), Local2D()):
            # Of keys that are split the norm needs a sum along tp_col: a DTensor has it.
            if split and not (norm is RMSNorm and style is None):
                continue
            plan = {
                "embed": Rowwise2D(output_layouts=Shard(1)),
                "positions": Rowwise2D(output_layouts=(Replicate(), Shard(0))),
                "norm": SequenceParallel(),
                "attention": Attention2D(),
                "attention.q": q,
                "attention.[kv]": kv,
                "attention.o": o,
            }
            if style is not None:
                plan |= {"attention.k_norm": style, "position_norm": style}
            one = Model(norm).double()
            several = parallelize_module(copy.deepcopy(one), mesh, plan)
            ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
            one(ids).sin().sum().backward()
            several(ids).sin().sum().backward()
            for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
                if a.grad.norm() > 1e-10:  # A key's bias has none: softmax does not see it.
                    # The copies too: they drift apart where a sum is missing.
                    copies = [b.grad.full_tensor(), b.grad.to_local()]
                    found = [relative(x, a.grad) for x in copies if x.shape == a.grad.shape]
                    seen[f"{norm.__name__} {style} {name}"] = max(found)
    return seen


class Positions(nn.Module):
    """A table looked up by a module of somebody's own, which Replicate() runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 9 * HIDDEN).view(9, HIDDEN))

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN), Positions()
        self.norm, self.scale = RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.positions(torch.arange(ids.shape[1])))
        return self.embed(ids) + self.scale(x)


def _of_own_tables(rows: int, columns: int) -> dict[str, float]:
    mesh, seen = grid_mesh(rows, columns), {}
    for style in (torch_tp2d.Replicate, Local2D):
        plan = {
            "embed": Rowwise2D(output_layouts=Replicate(), use_local_output=True),
            "positions": torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate())),
            "norm": style(),
            "scale": style(),
        }
        one = Small().double()
        several = parallelize_module(copy.deepcopy(one), mesh, plan)
        ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
        one(ids).sin().sum().backward()
        y = several(ids)
        y.sin().sum().backward()
        for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
            seen[f"{style.__name__} {name}"] = relative(b.grad.full_tensor(), a.grad)
    return seen


def _whole_with_shares(rows: int, columns: int) -> dict[str, float]:
    """Each row and column takes a loss of its own of what a norm hands on whole."""
    mesh, seen = grid_mesh(rows, columns), {}
    for norm in (RMSNorm, nn.LayerNorm):
        one = norm(HIDDEN).double()
        style = torch_tp2d.Replicate(
            input_layouts=(Replicate(), Replicate()), grad_layouts=(Partial(), Partial())
        )
        several = parallelize_module(copy.deepcopy(one), mesh, style)
        x, local = (noise(4, HIDDEN).requires_grad_() for _ in range(2))
        losses = [(rank + 1) * one(x).sin().sum() for rank in range(rows * columns)]
        torch.stack(losses).sum().backward()
        ((mesh.get_rank() + 1) * several(local).sin().sum()).backward()
        seen[f"{norm.__name__} input"] = relative(local.grad, x.grad)
        for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
            seen[f"{norm.__name__} {name}"] = relative(b.grad.full_tensor(), a.grad)
    return seen


def _refused(rows: int, columns: int) -> list[str]:
    mesh, messages = grid_mesh(rows, columns), []
    stream = {"output_layouts": Shard(1), "use_local_output": True}
    q, kv, o = attention_projections(HEADS, KEY_HEADS, columns, **stream)
    for given in (
        {"output_layouts": Shard(1)},
        {"use_local_output": False},
        {"grad_layouts": (Partial(), Replicate())},  # of one row: the same as what it is given
        {"input_layouts": Shard(1)},
    ):
        plan = {
            "embed": Rowwise2D(output_layouts=Shard(1)),
            "positions": Rowwise2D(output_layouts=(Replicate(), Shard(0))),
            "norm": SequenceParallel(),
            "position_norm": torch_tp2d.Replicate(),
            "attention": Attention2D(),
            "attention.q": q,
            "attention.[kv]": kv,
            "attention.k_norm": torch_tp2d.Replicate(**given),
            "attention.o": o,
        }
        model = parallelize_module(Model(RMSNorm).double(), mesh, plan)
        try:
            model(torch.zeros(4, 7, dtype=torch.long))
            messages.append("ran")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("rows,columns", [(1, 4), deep(2, 2), deep(4, 1), deep(2, 4)])
def test_norms_of_whole_keys_and_of_positions(rows: int, columns: int) -> None:
    """Keys that do not divide are whole on each column, which uses them for its own queries.

    A norm over all their heads together (OLMo 2's), not head by head, had no sum along tp_col: its
    gradient was off by up to 119 %, on 1x4 alone, and the copies of it drifted apart. A norm of
    positions, which each row adds to its own tokens, had none along tp_row.
    """
    for seen in run(rows * columns, _trained, rows, columns):
        assert max(seen.values()) < 1e-11, {k: v for k, v in seen.items() if v > 1e-11}


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1)])
def test_norms_of_what_a_module_of_ids_hands_on(rows: int, columns: int) -> None:
    """Replicate() on a module of ids hands on shares of a gradient, and did not say so.

    A norm after it had no sum along tp_row.
    """
    for seen in run(rows * columns, _of_own_tables, rows, columns):
        assert max(seen.values()) < 1e-11, seen


def test_grad_layouts_hold_for_torch_norms_too() -> None:
    """Replicate(grad_layouts=) was left out without a word where torch's own norm runs locally."""
    for seen in run(4, _whole_with_shares, 2, 2):
        assert max(seen.values()) < 1e-11, seen


def test_only_the_like_of_a_share_is_handed_on() -> None:
    """Replicate() left out the output_layouts that it was given there, without a word."""
    for messages in run(4, _refused, 1, 4):
        *asked, same, declared = messages
        assert all("gradient is a share of each rank's along ['tp_col']" in m for m in asked), asked
        assert same == "ran"
        assert "hands on one of shape" in declared
