"""Compares a model under a plan with one device: outputs by module and all gradients, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat.tensors import tree_leaves
from ..mesh.axes import part_of
from ..mesh.grid import Grid, check_mesh
from ..mesh.handed import Handed, said_of
from ..mesh.layouts import TP_COL, TP_ROW, normalize
from ..parallelize import parallelize_module
from ..plans import plan_for
from ..plans.sample import Inputs, sample_inputs
from ..styles.dtensors import to_dtensor
from .processes import on_processes
from .sandbox import shorten

__all__ = ["PlanCheck", "check_plan"]


@dataclass(frozen=True)
class PlanCheck:
    """Relative differences of a model under a plan from one device, the largest of all ranks.

    Attributes:
        outputs: by name of module, in the order of their first calls.
        gradients: by name of parameter.
        unseen: modules whose outputs are shards in an unknown layout, which were not compared.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    unseen: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max([0.0, *self.outputs.values(), *self.gradients.values()])

    def __str__(self) -> str:
        return (
            f"{len(self.outputs)} outputs within {max(self.outputs.values(), default=0.0):.1e} of "
            f"one device's, {len(self.gradients)} gradients within "
            f"{max(self.gradients.values(), default=0.0):.1e}; {len(self.unseen)} outputs are "
            f"parts that cannot be compared"
        )


def check_plan(
    model: nn.Module,
    mesh: DeviceMesh | tuple[int, int],
    plan: Any = None,
    *,
    inputs: Any = None,
    batch: int | None = None,
    seq: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    layers: int | None = 2,
    tolerance: float = 1e-6,
) -> PlanCheck:
    """Compare a copy of the model under a plan with another on one device, forward and backward.

    Both are in fp64 and in ``eval``, without dropout, so that they differ by rounding only. Each
    rank needs memory for two copies, so try a small configuration.

    Args:
        model: with values, not parallelized yet; it is not changed.
        mesh: named ``("tp_row", "tp_col")``, where every rank calls this function with the same
            model and inputs; or ``(R, C)``, for which R * C processes are started on this
            machine's CPU. The model and the plan then have to be picklable, and a script needs the
            usual ``if __name__ == "__main__"``.
        plan: as :func:`torch_tp2d.parallelize_module` takes it, a function of a model and a mesh
            that returns one, or None for :func:`torch_tp2d.plan_for`.
        inputs: a dict of keyword arguments or a tuple of arguments of the model: global tensors, or
            DTensors for a model without an embedding. By default random ids, images or sounds, if
            the model's signature says enough.
        batch, seq: the sizes of random inputs; by default sizes that do not divide over the mesh.
        loss: a function of the model's output that returns a scalar; by default the model's own
            loss, else a mean of squares.
        layers: how many of each list of equal layers are tried at most; None for all.
        tolerance: the largest relative difference that counts as equal. Some models compute norms
            and their loss in fp32 whatever their input, which leaves 1e-7; a wrong gradient differs
            by percents.

    Returns:
        The differences, if all of them are within the tolerance.

    Raises:
        ValueError: if an output or a gradient differs, naming the first module whose output does;
            if a module cannot run under the plan; and for a model that is parallelized already or
            has no values.

    Example::

        >>> print(torch_tp2d.check_plan(model, (2, 2)))
        61 outputs within 3.1e-15 of one device's, 38 gradients within 2.2e-14; ...
    """
    if any(isinstance(p, DTensor) or p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has parameters that are on a mesh already, or without values: "
            f"give check_plan a model as it is made on one device"
        )
    options = {"inputs": inputs, "batch": batch, "seq": seq, "loss": loss, "layers": layers}
    if isinstance(mesh, DeviceMesh):
        check_mesh(mesh)
        found = _on_mesh(model, mesh, plan, **options)
    else:
        found, *_ = on_processes(tuple(mesh), _on_mesh_of_its_own, model, plan, options)
    _refuse_wrong(model, found, tolerance)
    return found


def _refuse_wrong(model: nn.Module, found: PlanCheck, tolerance: float) -> None:
    # "not <=" instead of ">", so that NaN counts as wrong.
    outputs = {name: x for name, x in found.outputs.items() if not x <= tolerance}
    gradients = {name: x for name, x in found.gradients.items() if not x <= tolerance}
    if not outputs and not gradients:
        return
    first = next(iter(outputs.items()), None)
    said = "all outputs are right" if first is None else f"{first[0]} is the first to differ"
    if first is not None:
        said += f", its output by {first[1]:.1e}"
    worst = sorted(gradients.items(), key=lambda one: -one[1])[:5]
    listed = ", ".join(f"{name} by {x:.1e}" for name, x in worst)
    raise ValueError(
        f"{type(model).__name__} under the plan is not what it is on one device: {said}; of "
        f"{len(found.gradients)} gradients {len(gradients)} differ{': ' if worst else ''}{listed}"
    )


def _on_mesh_of_its_own(
    mesh: DeviceMesh, model: nn.Module, plan: Any, options: dict[str, Any]
) -> PlanCheck:
    return _on_mesh(model, mesh, plan, **options)


def _on_mesh(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Any,
    *,
    inputs: Any,
    batch: int | None,
    seq: int | None,
    loss: Callable[[Any], Tensor] | None,
    layers: int | None,
) -> PlanCheck:
    rows, columns = mesh.shape
    reference = copy.deepcopy(model).double().eval()
    if layers is not None:
        shorten(reference, layers)
    tried = copy.deepcopy(reference)
    sizes = 2 * rows + 1 if batch is None else batch, 2 * rows * columns + 1 if seq is None else seq
    given = _inputs(reference, inputs, *sizes)
    wanted: dict[str, Tensor] = {}
    # Outputs are cloned, since later modules may change them in place.
    with _outputs(reference, lambda name, y, _: wanted.setdefault(name, y.detach().clone())):
        _loss(given.each(_gathered).given_to(reference), loss, mesh).backward()
    if plan is None:
        # The plan is derived from a forward of the copy, which takes what is in fp64.
        same = given.kwargs if isinstance(inputs, Mapping) else given.args
        plan = plan_for(tried, mesh, inputs=None if inputs is None else same)
    elif callable(plan):
        plan = plan(tried, mesh)
    parallelize_module(tried, mesh, plan)
    outputs: dict[str, float] = {}
    unseen: list[str] = []

    def compare(name: str, y: Tensor, said: Handed) -> None:
        if name in outputs or name in unseen or name not in wanted:
            return
        whole = _whole(y, said, wanted[name], mesh, tried.get_submodule(name))
        if whole is None:
            unseen.append(name)
        else:
            outputs[name] = _difference(whole, wanted[name])

    with _outputs(tried, compare) as running:
        try:
            _loss(given.given_to(tried), loss, mesh).backward()
        except RuntimeError as error:
            # DTensor's own error, for example, does not name the module.
            where = running[-1] if running else "its backward"
            raise ValueError(
                f"{type(model).__name__} cannot run under the plan: {where} raised "
                f"{type(error).__name__}: {error}"
            ) from error
    gradients = _gradients(reference, tried)
    names = [*outputs, *gradients]
    both = [*outputs.values(), *gradients.values()]
    worst = torch.tensor(both, dtype=torch.float64, device="cpu")
    _over_mesh(worst, mesh, dist.ReduceOp.MAX)
    seen = dict(zip(names, worst.tolist(), strict=True))
    return PlanCheck(
        {name: seen[name] for name in outputs},
        {name: seen[name] for name in gradients},
        tuple(unseen),
    )


def _inputs(model: nn.Module, given: Any, batch: int, seq: int) -> Inputs:
    """Inputs with values in fp64 or integers, the same on every rank."""
    made = sample_inputs(model, given, batch, seq, values=True)
    if made is None:
        raise ValueError(
            f"{type(model).__name__} does not say by its signature which ids, images or sounds it "
            f"takes: give inputs="
        )

    device = next(model.parameters()).device

    def ready(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, torch.float64 if x.is_floating_point() else None)

    return made.each(ready).without_cache(model)


def _gathered(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _loss(out: Any, loss: Callable[[Any], Tensor] | None, mesh: DeviceMesh) -> Tensor:
    if loss is not None:
        return loss(out)
    own = out.get("loss") if isinstance(out, Mapping) else None
    if own is not None:
        return own
    (y, *_) = (x for x in _tensors(out) if x.is_floating_point())
    said = said_of(y)
    if said.layout is not None and said.axes is not None:
        # The output is a shard, but the mean is over the global output.
        y = to_dtensor(y, said.layout, Grid(mesh, said.axes))
    return _gathered(y.square().mean())


@contextmanager
def _outputs(model: nn.Module, see: Callable[[str, Tensor, Handed], Any]) -> Iterator[list[str]]:
    """Call ``see`` after each module, with its name, its first output tensor and that one's layout.

    Yields the names of the modules that run, the innermost last. A module that raises stays in it.
    """
    running: list[str] = []

    def begins(name: str, module: nn.Module, args: Any) -> None:
        running.append(name)

    def hook(name: str, module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        y = next((x for x in _tensors(output) if x.is_floating_point()), None)
        if y is not None:
            # A module without a style that keeps the shape of its input keeps the layout too.
            alike = (x for x in _tensors(args) if x.shape == y.shape)
            told = (said_of(x) for x in (y, *alike))
            see(name, y, next((said for said in told if said.layout is not None), Handed()))

    hooks = []
    for name, module in model.named_modules():
        if name:
            before = module.register_forward_pre_hook(partial(begins, name), prepend=True)
            hooks += [before, module.register_forward_hook(partial(hook, name))]
    try:
        yield running
    finally:
        for one in hooks:
            one.remove()


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _whole(
    y: Tensor, said: Handed, like: Tensor, mesh: DeviceMesh, module: nn.Module
) -> Tensor | None:
    """The global output, gathered from all ranks; None on all if any does not know its layout."""
    if isinstance(y, DTensor):
        fits = y.shape == like.shape
    else:
        fits = False
        if said.layout is not None and said.axes is not None:
            grid = Grid(mesh, said.axes)
            y = grid.without_stand_in(y, said.layout)
            fits = y.shape == _part(like.shape, y, said.layout, grid) and not _is_fused(module)
            if fits:
                y = to_dtensor(y.detach(), said.layout, grid, like.shape)
        elif y.shape == like.shape:
            fits = True
    agreed = torch.tensor([float(fits)], device="cpu")
    _over_mesh(agreed, mesh, dist.ReduceOp.MIN)
    if not agreed.item():
        return None
    return _gathered(y)


def _part(shape: Sequence[int], y: Tensor, layout: Any, grid: Grid) -> tuple[int, ...] | None:
    """The shape of this rank's shard."""
    if len(shape) != y.ndim:
        return None
    placements = normalize(layout, y.ndim)
    return tuple(part_of(extent, grid.cuts(dim, placements)) for dim, extent in enumerate(shape))


def _is_fused(module: nn.Module) -> bool:
    """Whether a module is a fused projection, whose shard has a part of each projection."""
    return bool(getattr(module.__dict__.get("_tp2d"), "parts", ()))


def _gradients(reference: nn.Module, tried: nn.Module) -> dict[str, float]:
    ours, found = dict(tried.named_parameters()), {}
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    scale = max([0.0, *(float(grad.norm()) for grad in wanted.values())])
    for name, grad in wanted.items():
        mine = ours[name].grad
        if mine is None:
            found[name] = float("inf")
            continue
        mine = _gathered(mine)
        # The scale is for gradients of zero but for rounding, as of a key's bias, which softmax
        # cancels.
        found[name] = float((mine - grad).norm() / max(float(grad.norm()), 1e-9 * scale))
    return found


def _difference(whole: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.norm())
    return float((whole.detach() - wanted.detach()).norm() / (scale or 1.0))


def _over_mesh(x: Tensor, mesh: DeviceMesh, op: Any) -> None:
    for name in (TP_COL, TP_ROW):
        if mesh[name].size() > 1:
            there = x.to(mesh.device_type)
            dist.all_reduce(there, op, mesh.get_group(name))
            x.copy_(there)
