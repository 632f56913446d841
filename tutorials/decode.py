"""Decode one token at a time with weights that never move.

A token is far smaller than a weight, so it is the one to travel. Under ``dataflow=
"weight_stationary"`` the residual stream lies transposed, hidden over ``tp_row`` and tokens over
``tp_col`` or whole, as ``plan`` below has it; every weight lies as in the usual plan, so a
checkpoint of one is a checkpoint of the other.

    torchrun --standalone --nproc-per-node 4 tutorials/decode.py --grid 2x2

decodes greedily on the grid and on one device, compares, and prints what a token moves.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import torch_tp2d
from torch_tp2d import Colwise2D, CommCounter, Norm2D, Rowwise2D
from torch_tp2d.comm.groups import BACKEND

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of the tokens so far, ``[batch, heads, tokens, head_dim]``, of each layer."""


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.wq, self.wk, self.wv = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.wo = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        # As many heads as the projections give: on a grid a rank has its own.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.w1, self.w2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        y, now = self.attention(self.attention_norm(x), past)
        x = x + y
        return x + self.w2(F.gelu(self.w1(self.mlp_norm(x)))), now


class Decoder(nn.Module):
    """A GPT with tied embeddings and a cache. Nothing in it knows of a grid."""

    def __init__(self, vocab: int, context: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits of ``ids[batch, sequence]``, which come after what ``cache`` holds.

        With a cache, one token at a time: the first call sees a whole prompt.
        """
        start = cache[0][0].shape[2] if cache else 0
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        held: Cache = []
        for index, layer in enumerate(self.layers):
            x, now = layer(x, cache[index] if cache else None)
            held.append(now)
        return self.head(self.norm(x)), held


def plan(tokens: Placement | None = None) -> dict[str, Any]:
    """The weight-stationary plan of :class:`Decoder`.

    Args:
        tokens: how ``tp_col`` holds the residual stream's tokens: ``Replicate()`` (default, for a
            token or few), ``Shard(0)`` by the batch or ``Shard(1)`` by the sequence.

    Attention and the MLP have the tokens whole on every rank, heads and features over ``tp_col``.
    """
    tokens = Replicate() if tokens is None else tokens
    stream, inner = (Shard(-1), tokens), (Replicate(), Shard(-1))
    # Positions have no batch. Where tp_col splits it they are added to other tokens on each rank
    # of it, so that their gradients are shares.
    places = Shard(0) if tokens == Shard(1) else Replicate()
    place_grads = (Shard(-1), Partial() if tokens == Shard(0) else places)
    stays = {"dataflow": "weight_stationary"}
    up = Colwise2D(input_layouts=stream, output_layouts=inner, **stays)
    down = Rowwise2D(input_layouts=inner, output_layouts=stream, **stays)
    norm = Norm2D(input_layouts=stream)
    return {
        "tokens": Rowwise2D(output_layouts=stream),
        "positions": Rowwise2D(output_layouts=(Shard(-1), places), grad_layouts=place_grads),
        "layers.*.attention_norm": norm,
        "layers.*.attention.w[qkv]": up,
        "layers.*.attention.wo": down,
        "layers.*.mlp_norm": norm,
        "layers.*.w1": up,
        "layers.*.w2": down,
        "norm": norm,
        "head": Colwise2D(input_layouts=stream, output_layouts=(Replicate(), Replicate()), **stays),
    }


def usual_plan() -> dict[str, Any]:
    """The plan for many tokens, whose weights move: a stock tensor-parallel one renamed."""
    return {
        "tokens": Rowwise2D(output_layouts=Replicate()),
        "positions": Rowwise2D(output_layouts=Replicate()),
        "layers.*.attention.w[qkv]": Colwise2D(),
        "layers.*.attention.wo": Rowwise2D(),
        "layers.*.w1": Colwise2D(),
        "layers.*.w2": Rowwise2D(),
        "head": Colwise2D(output_layouts=(Replicate(), Replicate())),
    }


@torch.no_grad()
def decode(model: nn.Module, prompt: Tensor, count: int) -> Tensor:
    """``count`` more tokens after ``prompt[batch, sequence]``, the likeliest each time."""
    ids, (logits, cache) = prompt, model(prompt)
    for index in range(count):
        last = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, last], 1)
        if index + 1 < count:
            logits, cache = model(last, cache)
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grid", default="2x2", help="rows x columns")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--count", type=int, default=16, help="tokens to decode")
    args = parser.parse_args()
    rows, columns = map(int, args.grid.split("x"))
    dist.init_process_group(BACKEND)
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("tp_row", "tp_col"))
    torch.manual_seed(0)
    reference = Decoder(vocab=512, context=128, hidden=256, heads=8, layers=2).double()
    prompt = torch.randint(0, 512, (args.batch, 4))
    wanted = decode(reference, prompt, args.count)
    for name, chosen in (("usual", usual_plan()), ("weight stationary", plan())):
        model = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(model, mesh, chosen)
        ids = decode(model, prompt, args.count)
        with torch.no_grad():
            _, cache = model(prompt)
            with CommCounter(mesh) as comm:
                model(prompt[:, -1:], cache)
        if dist.get_rank() == 0:
            same = "as on one device" if torch.equal(ids, wanted) else "NOT as on one device"
            print(f"{name:18} {comm.total_bytes:10} B received for a token; decoded {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
