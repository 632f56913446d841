"""The parallel plans that the benchmark compares, and one rank's share of the work without any.

tp        ColwiseParallel and RowwiseParallel on a line of ranks; norms and residuals whole
tp-input  the same, its input prepared once by PrepareModuleInput, so that the gradients of
          the q, k and v projections are summed before they are reduced, not after
tp-sp     tp-input with SequenceParallel norms and a residual stream sharded by sequence
fsdp      FSDP2 alone, the batch split over the ranks
fsdp-tp   FSDP2 over the rows of a grid, `tp-input` over its columns
fsdp-sp   FSDP2 over the rows of a grid, `tp-sp` over its columns
cp-tp     torch's context_parallel over 2 (which splits the sequence; the weights over the
          same 2 by FSDP2), `tp` over the rest
tp2d      the tp-sp plan with its two classes renamed to torch_tp2d's, on a grid;
          `tp2d:NAME` asks its Linears for the algorithm NAME

FSDP2 gathers weights again for backward; in `fsdp-kept`, `fsdp-tp-kept` and `fsdp-sp-kept` it keeps
them (``reshard_after_forward=False``): less to send, more memory. `tp2d` keeps them, and
`tp2d-again` gathers them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from model import Model
from reduce_scatter import ExchangeReduceScatter, exchanged_reduce_scatters
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_tp2d
from torch_tp2d.planner.sandbox import blocks_of

KEPT = "-kept"
FSDP_PLANS = tuple(name + kept for name in ("fsdp", "fsdp-tp", "fsdp-sp") for kept in ("", KEPT))
GRID_PLANS = tuple(name for name in FSDP_PLANS if name.removesuffix(KEPT) != "fsdp")
"""The stock plans that run on a grid of more than one row and column."""
STOCK_PLANS = ("tp", "tp-input", "tp-sp", *FSDP_PLANS, "cp-tp")
REDUCE_SCATTERING_PLANS = ("tp-sp", *FSDP_PLANS, "cp-tp")
"""The stock plans that reduce-scatter, and so pay for how gloo does it."""
OURS = "tp2d"
AGAIN = "-again"
SEED = 20240


Grid = tuple[int, int]
"""Rows and columns."""


def grids_of(world: int) -> list[Grid]:
    """Every grid of so many ranks."""
    return [(rows, world // rows) for rows in range(1, world + 1) if world % rows == 0]


def is_ours(name: str) -> bool:
    """Whether a plan is of this library."""
    plan = name.partition(" ")[0].partition(":")[0]
    return plan.removesuffix(AGAIN).removesuffix(KEPT) == OURS


def titled(name: str, grid: Grid) -> str:
    """The name of a plan, with its grid where it may have several."""
    on_grids = name in GRID_PLANS or is_ours(name)
    return f"{name} {grid[0]}x{grid[1]}" if on_grids else name


class NotRunnable(Exception):
    """A plan cannot run these sizes on these ranks; the message says why."""


@dataclass(frozen=True)
class Sizes:
    """The model and the global batch, all ranks together."""

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def elements(self) -> int:
        """Of the input, ``[batch, seq, hidden]``."""
        return self.batch * self.seq * self.hidden


@dataclass(frozen=True)
class Share:
    """How a plan divides the work of a step.

    ``rows`` split the tokens, ``columns`` the heads and the features in the middle of the
    feed-forward; with ``norms_split`` the columns also split the tokens that the norms see.
    """

    rows: int
    columns: int
    norms_split: bool = False


@dataclass
class Variant:
    """One plan, ready to step, and what was seen of it.

    ``copies`` is on how many ranks each element of the output is; ``gradient_scale`` undoes the
    average that FSDP takes over its ranks, so that every plan computes the same gradients;
    ``around`` is entered for each step. A ``tentative`` plan may turn out not to run at all.
    """

    name: str
    model: nn.Module
    local_input: Tensor
    share: Share
    copies: int = 1
    gradient_scale: int = 1
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    tentative: bool = False
    efficient: bool = False
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    step_memory: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    again: int = 0

    @property
    def title(self) -> str:
        """The name, and whether its reduce-scatter was replaced."""
        return f"{self.name} (efficient reduce-scatter)" if self.efficient else self.name

    def step(self, elements: int) -> Tensor:
        """Forward and backward; returns this rank's share of the loss."""
        with self.around():
            out = self.model(self.local_input)
            loss = out.float().pow(2).sum() / elements
            (loss * self.gradient_scale).backward()
            for parameter in self.model.parameters():
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
                # A step that leaves a transfer running has not ended.
                if isinstance(grad, AsyncCollectiveTensor):
                    grad.wait()
        return loss.detach() / self.copies


def line_plan() -> dict[str, ParallelStyle]:
    """Tensor parallelism alone."""
    return {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
    }


def line_input_plan() -> dict[str, ParallelStyle]:
    """Tensor parallelism with one gradient reduction for the three projections."""
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return {"layers.*.attention": prepare, **line_plan()}


def sequence_plan(
    colwise: Callable[..., ParallelStyle], rowwise: Callable[..., ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Tensor and sequence parallelism, in the shape of PyTorch's tutorial plan."""
    prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": prepare,
        "layers.*.attention.wq": colwise(),
        "layers.*.attention.wk": colwise(),
        "layers.*.attention.wv": colwise(),
        "layers.*.attention.wo": rowwise(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": prepare,
        "layers.*.feed_forward.w1": colwise(),
        "layers.*.feed_forward.w2": rowwise(output_layouts=Shard(1)),
    }


def shard_blocks(model: nn.Module, mesh: DeviceMesh, *, kept: bool = False) -> None:
    """FSDP2 as its documentation applies it: block by block, then the root.

    Args:
        kept: keep a block's gathered weights for backward. (None is FSDP2's default: the root's
            are kept.)
    """
    for layer in blocks_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False if kept else None)
    fully_shard(model, mesh=mesh)


def use_efficient_reduce_scatter(model: nn.Module) -> None:
    """Have FSDP2 reduce-scatter by exchanging shards and summing them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ExchangeReduceScatter())


def part(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's equal part of ``x`` along ``dim``, over a one-dimensional mesh."""
    what = ("a batch", "a sequence")[dim]
    if x.shape[dim] % mesh.size():
        raise NotRunnable(f"{what} of {x.shape[dim]} does not split over {mesh.size()} ranks")
    # A copy: a part that lies within the whole would keep all of it in memory.
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(
        memory_format=torch.contiguous_format
    )


def build_line(name: str, model: Model, x: Tensor, grid: Grid, efficient: bool) -> Variant:
    """The stock plans on a line of all ranks."""
    _, world = grid
    mesh = init_device_mesh(x.device.type, (world,), mesh_dim_names=("tp",))
    if name == "tp-sp":
        parallelize_module(model, mesh, sequence_plan(ColwiseParallel, RowwiseParallel))
        around = exchanged_reduce_scatters if efficient else nullcontext
        return Variant(name, model, part(x, 1, mesh), Share(1, world, True), around=around)
    parallelize_module(model, mesh, line_plan() if name == "tp" else line_input_plan())
    return Variant(name, model, x, Share(1, world), copies=world)


def build_fsdp(name: str, model: Model, x: Tensor, grid: Grid, efficient: bool) -> Variant:
    """FSDP2 alone."""
    world, _ = grid
    mesh = init_device_mesh(x.device.type, (world,), mesh_dim_names=("dp",))
    variant = Variant(name, model, part(x, 0, mesh), Share(world, 1), gradient_scale=world)
    shard_blocks(model, mesh, kept=name.endswith(KEPT))
    if efficient:
        use_efficient_reduce_scatter(model)
    return variant


def build_fsdp_grid(name: str, model: Model, x: Tensor, grid: Grid, efficient: bool) -> Variant:
    """FSDP2 over tensor parallelism."""
    rows, columns = grid
    both = init_device_mesh(x.device.type, grid, mesh_dim_names=("dp", "tp"))
    x = part(x, 0, both["dp"])
    title = titled(name, grid)
    if name.removesuffix(KEPT) == "fsdp-sp":
        parallelize_module(model, both["tp"], sequence_plan(ColwiseParallel, RowwiseParallel))
        x = part(x, 1, both["tp"])
        variant = Variant(title, model, x, Share(rows, columns, True), gradient_scale=rows)
        if efficient:
            variant.around = exchanged_reduce_scatters
    else:
        parallelize_module(model, both["tp"], line_input_plan())
        variant = Variant(title, model, x, Share(*grid), copies=columns, gradient_scale=rows)
    shard_blocks(model, both["dp"], kept=name.endswith(KEPT))
    if efficient:
        use_efficient_reduce_scatter(model)
    return variant


def build_context(name: str, model: Model, x: Tensor, grid: Grid, efficient: bool) -> Variant:
    """Context parallelism over the rows, with FSDP2, over tensor parallelism."""
    rows, tp = grid
    if rows * tp != dist.get_world_size() or tp == 1:
        raise NotRunnable(f"{name} needs an even number of ranks, 4 or more")
    both = init_device_mesh(x.device.type, grid, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, both["tp"], line_plan())
    variant = Variant(name, model, x, Share(*grid), copies=tp, gradient_scale=rows, tentative=True)
    variant.around = partial(context_parallel, both["dp"], buffers=[x], buffer_seq_dims=[1])
    shard_blocks(model, both["dp"])
    if efficient:
        use_efficient_reduce_scatter(model)
    return variant


def build_grid(name: str, model: Model, x: Tensor, grid: Grid) -> Variant:
    """The tp-sp plan on a grid: two classes renamed, and the mesh.

    The model has no embedding, which would tell the sizes of the tokens, so they are said.
    """
    base, _, algorithm = name.partition(":")
    options: dict[str, Any] = {"reshard_after_forward": base.endswith(AGAIN)}
    options |= {"algorithm": algorithm} if algorithm else {}
    plan = sequence_plan(
        partial(torch_tp2d.Colwise2D, **options), partial(torch_tp2d.Rowwise2D, **options)
    )
    mesh = init_device_mesh(x.device.type, grid, mesh_dim_names=("tp_row", "tp_col"))
    try:
        torch_tp2d.parallelize_module(model, mesh, plan)
    except ValueError as error:
        raise NotRunnable(str(error)) from error
    torch_tp2d.token_sizes(mesh, (x.shape[0], x.shape[1]))
    tokens = part(part(x, 0, mesh["tp_row"]), 1, mesh["tp_col"])
    return Variant(titled(name, grid), model, tokens, Share(*grid, True))


def fresh_model(sizes: Sizes, parts: int = 1) -> Model:
    """The same weights each time, on every rank."""
    torch.manual_seed(SEED)
    with torch.device(sizes.device):
        model = Model(sizes.layers, sizes.hidden, sizes.heads, parts)
    return model.to(sizes.dtype)


def global_input(sizes: Sizes) -> Tensor:
    """The same on every rank, ``[batch, seq, hidden]``."""
    generator = torch.Generator(sizes.device).manual_seed(SEED + 1)
    shape = sizes.batch, sizes.seq, sizes.hidden
    return torch.randn(shape, generator=generator, device=sizes.device).to(sizes.dtype)


def stock_meshes(name: str, grids: Sequence[Grid], world: int) -> list[Grid]:
    """The rows (of data) and columns (of features) that a stock plan has its ranks in."""
    if name in GRID_PLANS:
        return [grid for grid in grids if min(grid) > 1]
    if name in FSDP_PLANS:
        return [(world, 1)]
    return [(2, world // 2)] if name == "cp-tp" else [(1, world)]


def build_stock(name: str, grid: Grid, sizes: Sizes, x: Tensor) -> list[Variant]:
    """A stock plan as it is and, if it reduce-scatters, with an efficient reduce-scatter."""
    if sizes.heads % grid[1]:
        raise NotRunnable(f"{sizes.heads} heads do not split over {grid[1]} ranks")
    build_one = build_line
    if name in FSDP_PLANS:
        build_one = build_fsdp_grid if name in GRID_PLANS else build_fsdp
    elif name == "cp-tp":
        build_one = build_context
    variants = []
    for efficient in (False, True) if name in REDUCE_SCATTERING_PLANS else (False,):
        variant = build_one(name, fresh_model(sizes), x.clone(), grid, efficient)
        variant.efficient = efficient
        variants.append(variant)
    return variants


def build(
    names: Sequence[str], grids: Sequence[Grid], sizes: Sizes
) -> tuple[list[Variant], dict[str, str]]:
    """Every variant asked for, all from the same weights and input.

    Returns them, and for each plan that cannot run the reason why.
    """
    x = global_input(sizes)
    variants: list[Variant] = []
    refused: dict[str, str] = {}
    for name in names:
        ours = is_ours(name)
        for grid in grids if ours else stock_meshes(name, grids, dist.get_world_size()):
            try:
                if ours:
                    variants.append(build_grid(name, fresh_model(sizes), x, grid))
                else:
                    variants += build_stock(name, grid, sizes, x)
            except NotRunnable as error:
                refused[titled(name, grid)] = str(error)
    return variants, refused


def build_share(share: Share, sizes: Sizes) -> Variant:
    """One rank's share of the step in plain PyTorch, without a plan and without a transfer.

    A stack of the same blocks as narrow as the plan makes them (heads and feed-forward divided
    by ``columns``), on ``batch / rows`` sequences. Where the plan splits the tokens of norms and
    residuals too, those see ``seq / columns`` of them, and a copy and a slice stand where the
    plan gathers and scatters.
    """
    model = fresh_model(sizes, share.columns)
    kept = sizes.seq // share.columns if share.norms_split else sizes.seq
    if share.norms_split:
        for layer in model.layers:
            for module in (layer.attention, layer.feed_forward):
                module.register_forward_pre_hook(lambda _, x: x[0].repeat(1, share.columns, 1))
                module.register_forward_hook(lambda _, __, y: y[:, :kept])
    generator = torch.Generator().manual_seed(SEED + 2)
    x = torch.randn(sizes.batch // share.rows, kept, sizes.hidden, generator=generator)
    return Variant("compute alone", model, x.to(sizes.device, sizes.dtype), share)
