"""Runs and records one training step of a model on a mesh, on tensors without values."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat.distributed import deciding_layouts_within
from .._torch_compat.tensors import NEEDS_VALUES, fake_mode, local_tensor
from ..comm import transport_of
from ..loss import cross_entropy
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import TP_COL, TP_ROW, Layout, normalize
from ..mesh.no_sync import no_sync
from ..mesh.tokens import token_sizes
from ..parallelize import layouts_of, parallelize_module
from ..parallelize.table import LayoutTable
from ..plans import plan_for
from ..plans.sample import Inputs, copy_without_values, sample_inputs
from ..runtime.context import context_of
from .rates import Rates, suppose
from .sandbox import (
    dtype_of,
    fake_mesh,
    is_sharded_over_data,
    mesh_of,
    recompute_blocks,
    reshard,
    shard_over_data,
    shorten,
)
from .trace import Recorder

__all__ = ["NO_PLAN", "Case", "PlanLike", "Step", "run_step"]

NO_PLAN = "none"
"""Stands in the place of a plan for FSDP2 alone."""
PlanLike = Any
"""A plan as :func:`torch_tp2d.parallelize_module` takes it, a function of a model and a mesh that
returns one, or None for that of :func:`torch_tp2d.plan_for`."""


@dataclass(frozen=True)
class Case:
    """The step to run.

    Args:
        shape: that of the mesh; None if a plan was applied to the model already.
        plan: see :data:`PlanLike`; :data:`NO_PLAN` for FSDP2 alone.
        batch: sequences in a step, those of all data-parallel replicas together.
        seq: tokens of a sequence.
        rank: the rank of the mesh whose step is run.
        transport: ``"nccl"`` or ``"gloo"``.
        inputs: a dict of keyword arguments or a tuple of arguments of the model, for one replica;
            None if ``batch`` and ``seq`` say enough.
        loss: a function of the model's output that returns a scalar.
        reshard: whether FSDP2, if there is a data-parallel axis, frees gathered weights after
            forward.
        rates: the rates by which ``"auto"`` chooses.
        layers: by the name of a list of equal layers, how many of them are run; None for all.
        recompute: whether layers are recomputed for backward.
        micro_batches: how many micro-batches a step has; together they are ``batch``.
        reduce_each: whether each micro-batch gathers weights and reduces gradients; else this is
            done once for all of them.
        dropout: whether dropout modules drop anything.
    """

    shape: tuple[int, ...] | None
    plan: PlanLike
    batch: int
    seq: int
    rank: int = 0
    transport: str = "nccl"
    inputs: Any = None
    loss: Callable[[Any], Tensor] | None = None
    reshard: bool = True
    rates: Rates | None = None
    layers: Mapping[str, int] | None = None
    recompute: bool = False
    micro_batches: int = 1
    reduce_each: bool = False
    dropout: bool = True


@dataclass
class Step:
    """What was recorded of a step.

    Args:
        recorder: what it recorded, shapes, events and peak memory included.
        mesh: the sizes of the mesh's axes, by name.
        transport: ``"nccl"`` or ``"gloo"``.
        layouts: those that the plan was resolved to; None without a plan.
        kept: by module, the bytes of each kind of memory that live when forward is over.
        parameters: by module, the bytes of this rank's shards of parameters.
        trainable: bytes of this rank's shards of trainable parameters, and so of their gradients.
        weights: by module, the shape of this rank's shard of its weight.
    """

    recorder: Recorder
    mesh: dict[str, int]
    transport: str
    layouts: LayoutTable | None
    kept: Mapping[str, Counter[str]]
    parameters: Mapping[str, int]
    trainable: int
    weights: Mapping[str, tuple[int, ...]]


def run_step(model: nn.Module, case: Case) -> Step:
    """Run a copy of the model once, forward and backward; nothing is communicated.

    Raises:
        ValueError: for a model that FSDP2 was applied to, a batch that does not divide, and a model
            that cannot run on tensors without values or says neither its inputs nor its loss.
    """
    if is_sharded_over_data(model):
        raise ValueError(
            f"{type(model).__name__} was given to fully_shard: describe it before that, with the "
            f"axes of data parallelism in the mesh, as in (2, 2, 4) for [dp, {TP_ROW}, {TP_COL}]"
        )
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # The caller may be within no_grad(). Warnings are left to the real step.
        stack.enter_context(torch.enable_grad())
        # Where the copy is, whatever torch.set_default_device says.
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        mode = fake_mode()
        if case.shape is None:
            mesh = mesh_of(model)
            context = context_of(mesh)
            known = dict(vars(context))
            stack.callback(lambda: vars(context).update(known))
            copied = copy_without_values(model, mode)
            grid = mesh
        else:
            mesh = stack.enter_context(fake_mesh(case.shape, case.rank, case.transport))
            grid = mesh[TP_ROW, TP_COL]
            if case.rates is not None:
                suppose(grid, case.rates)
            copied = copy_without_values(model)
            if case.layers is not None:
                shorten(copied, case.layers)
            for module in copied.modules():
                if isinstance(module, nn.Dropout) and not case.dropout:
                    module.p = 0.0
            if case.plan is not NO_PLAN:
                _apply(copied, grid, case)
            copied = copy_without_values(copied, mode)
            if case.recompute:
                recompute_blocks(copied)
            shard_over_data(copied, mesh, case.reshard)
        return _record(copied, mesh, grid, case, mode)


def _apply(model: nn.Module, grid: DeviceMesh, case: Case) -> None:
    plan = case.plan
    if plan is None:
        plan = plan_for(model, grid, inputs=case.inputs)
    elif callable(plan):
        plan = plan(model, grid)
    parallelize_module(model, grid, plan, src_data_rank=None)


def _record(model: nn.Module, mesh: DeviceMesh, grid: DeviceMesh, case: Case, mode: Any) -> Step:
    replicas = math.prod(mesh.shape[:-2])
    if case.batch % replicas:
        raise ValueError(
            f"a batch of {case.batch} does not divide over the {replicas} replicas of mesh "
            f"{describe_mesh(mesh)}: use a multiple of {replicas}, or fewer replicas"
        )
    batch, left = divmod(case.batch // replicas, case.micro_batches)
    if left or not batch:
        raise ValueError(
            f"a batch of {case.batch} on mesh {describe_mesh(mesh)} is {case.batch // replicas} "
            f"sequences for each replica, which do not divide into {case.micro_batches} "
            f"micro-batches: use a multiple of {replicas * case.micro_batches}"
        )
    table = _layouts(model)
    with mode:
        plain = type(torch.empty(0, device="cpu"))
        inputs = _inputs(model, grid, table, batch, case)
        recorder = Recorder(model, mesh, plain)
        with recorder, deciding_layouts_within(recorder.paused), _refusing_values(model):
            if any(getattr(m.__dict__.get("_tp2d"), "in_rounds", False) for m in model.modules()):
                # A forward gathers ahead in the order of the one before, so run one before.
                _forward(model, inputs, case)
                reshard(model)
                recorder.forget()
            for left in reversed(range(case.micro_batches)):
                with _part_of_step(model, grid, case, last=not left):
                    loss = _forward(model, inputs, case)
                    kept = recorder.kept()
                    loss.backward()
                    # Free the graph, which would otherwise live beside the next one's.
                    del loss
    parameters: Counter[str] = Counter()
    trainable = 0
    weights = {}
    for name, param in model.named_parameters():
        owner = name.rpartition(".")[0]
        local = local_tensor(param)
        if name.endswith("weight"):
            weights[owner] = tuple(local.shape)
        parameters[owner] += local.numel() * local.element_size()
        if param.requires_grad:
            trainable += local.numel() * local.element_size()
    names = mesh.mesh_dim_names
    assert names is not None
    sizes = dict(zip(names, mesh.shape, strict=True))
    transport = transport_of(grid).name
    return Step(recorder, sizes, transport, table, kept, parameters, trainable, weights)


@contextmanager
def _refusing_values(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # DTensor, while it propagates shapes, raises from the error that we look for.
        asked = error if isinstance(error, NEEDS_VALUES) else error.__cause__
        if not isinstance(asked, NEEDS_VALUES):
            raise
        raise ValueError(
            f"{_module_that_raised(model, error)} calls {asked.func}, whose result depends on "
            f"values, and a step is described on tensors without any. Of a mixture of experts of "
            f'Hugging Face\'s, call model.set_experts_implementation("grouped_mm") before, or '
            f'"batched_mm" where that does not take its dtype; else describe a model whose forward '
            f"does without"
        ) from error


def _module_that_raised(model: nn.Module, error: BaseException) -> str:
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    module = next((m for m in reversed(frames) if isinstance(m, nn.Module) and m in names), model)
    return f"{names[module] or 'its forward'} ({type(module).__name__})"


@contextmanager
def _part_of_step(model: nn.Module, grid: DeviceMesh, case: Case, *, last: bool) -> Iterator[None]:
    """Run a micro-batch as a training loop would: under ``no_sync``, with FSDP2's switches set."""
    accumulates = not (last or case.reduce_each)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not accumulates)
        model.set_reshard_after_backward(case.reshard or not accumulates)
    with no_sync(grid) if accumulates else nullcontext():
        yield


def _forward(model: nn.Module, inputs: Inputs, case: Case) -> Tensor:
    out = inputs.given_to(model)
    loss = case.loss(out) if case.loss is not None else _loss(model, out, inputs.ids)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"{type(model).__name__}: loss= is to make a scalar that has a gradient of what the "
            f"model returns ({type(out).__name__})"
        )
    return loss


def _loss(model: nn.Module, out: Any, ids: Tensor | None) -> Tensor:
    """The model's own loss, else the cross entropy of logits on the grid, else a sum."""
    own = out.get("loss") if isinstance(out, Mapping) else None
    if own is not None:
        return own
    y = out if isinstance(out, Tensor) else None
    if y is None:
        y = next(iter(out.values() if isinstance(out, Mapping) else out), None)
    if not isinstance(y, Tensor):
        raise ValueError(
            f"{type(model).__name__} returns a {type(out).__name__}: say by loss= what scalar is "
            f"trained"
        )
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    if ids is not None and y.ndim == 3 and y.shape[-1] in vocabularies and isinstance(y, DTensor):
        return cross_entropy(y, ids)
    return y.sum()


def _inputs(
    model: nn.Module, grid: DeviceMesh, table: LayoutTable | None, batch: int, case: Case
) -> Inputs:
    known = sample_inputs(model, case.inputs, batch, case.seq)
    if known is not None and known.ids is not None:
        return known
    # Without an embedding nothing tells the global sizes of tokens from a rank's shard.
    try:
        part = _features(model, grid, table, batch, case.seq)
    except ValueError:
        if known is None:
            raise
        return known
    if known is None or known.has_one_of(part.shape):
        token_sizes(grid, (batch, case.seq))
    return known or Inputs((part,))


def _layouts(model: nn.Module) -> LayoutTable | None:
    try:
        return layouts_of(model)
    except ValueError:
        return None


def _features(
    model: nn.Module, grid: DeviceMesh, table: LayoutTable | None, batch: int, seq: int
) -> Tensor:
    """This rank's shard of hidden states, in the layout that the plan's first module takes.

    Raises:
        ValueError: if that module does not tell its number of features.
    """
    for module in model.modules():
        runner = module.__dict__.get("_tp2d")
        features = _in_features(module)
        if runner is None:
            if table is None and features is not None:
                return _zeros((batch, seq, features), model)
            continue
        takes = runner.resolved().input
        if isinstance(takes, str):
            continue
        if features is None:
            break
        local = [batch, seq, features]
        layout: Layout = normalize(takes, 3)
        where = Grid(grid, runner.grid.axes)
        for placement, axis in zip(layout, (where.row, where.col), strict=True):
            if isinstance(placement, Shard):
                local[placement.dim] = axis.split(local[placement.dim])[axis.index]
        return _zeros(local, model)
    raise ValueError(
        f"{type(model).__name__} has neither an embedding nor a first Linear or norm that would "
        f"tell what it takes: give inputs=, the arguments of its forward on one rank"
    )


def _zeros(shape: Sequence[int], model: nn.Module) -> Tensor:
    return torch.zeros(shape, dtype=dtype_of(model), device="cpu", requires_grad=True)


def _in_features(module: Any) -> int | None:
    for name in ("in_features", "nx", "normalized_shape"):
        found = getattr(module, name, None)
        if found is not None:
            return int(found if isinstance(found, int) else found[-1])
    weight = getattr(module, "weight", None)
    return int(weight.shape[-1]) if isinstance(weight, Tensor) and weight.ndim == 1 else None
