"""Low-rank adapters beside a styled Linear, as the ``peft`` library puts them there.

``peft.get_peft_model`` puts a module in the place of ``q_proj`` that holds the old one as
``base_layer`` and, for each adapter, ``lora_dropout``, ``lora_A`` ``[r, in]`` and ``lora_B``
``[out, r]``, and computes ``base(x) + scaling * B(A(dropout(x)))``. A plan entry for ``q_proj``
means all of them: see :func:`parts`. Of a module that is trained in full beside adapters
(``modules_to_save``) it keeps the old one and has a copy for each adapter, one of which runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..mesh.layouts import STATIONARY, TP_COL, Layout
from ..styles.base import GridStyle
from ..styles.dropout import Dropout2D
from ..styles.lifted import Lifted
from ..styles.linear import Block2DParallel, Colwise2D, Rowwise2D
from ..styles.module_kinds import describe_module, forward_of
from ..styles.replicated import Replicate

__all__ = ["is_adapted", "parts", "plain"]

_COPIES = "modules_to_save"
_LAYERS = (("base_layer", "lora_A"), ("original_module", _COPIES))
"""The names of the layer itself, and of what stands beside it."""
_KNOWN = ("base_layer", "lora_A", "lora_B", "lora_dropout")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module carries adapters or copies, recognized by the names of its children."""
    children = dict(module.named_children())
    return any(
        layer in children and isinstance(children.get(beside), nn.ModuleDict)
        for layer, beside in _LAYERS
    )


def plain(module: nn.Module) -> nn.Module:
    """The layer itself, of one that carries adapters or of which copies are trained."""
    children = dict(module.named_children())
    return next((children[name] for name, _ in _LAYERS if name in children), module)


def parts(module: Any, style: ParallelStyle) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """The parts of a module with adapters, and what a style for it means for each.

    Copies get the style, and so does the base layer. Products with the adapter's short dim ``r``
    are small, so where the base layer would move tokens of full width, the adapter moves tokens of
    width ``r``. By how the features of the base layer's input and output are laid out along
    ``tp_col``:

    =========================  ==========================  =================================
    base's input, output       ``lora_A``                  ``lora_B``
    =========================  ==========================  =================================
    replicated, split          ``Replicate``               ``Colwise2D``
    split, replicated          ``Rowwise2D``               ``Replicate``
    split, split               ``Rowwise2D``               ``Colwise2D``
    replicated, replicated     ``Replicate``               ``Replicate``
    =========================  ==========================  =================================

    Yields:
        The part's name under ``module``, the part, and its style.

    Raises:
        ValueError: for adapters that are not a pair of Linears, and for a style that is not one of
            ``Colwise2D``, ``Rowwise2D``, ``Block2DParallel`` or their stock namesakes.
    """
    if hasattr(module, _COPIES):
        yield "original_module", module.original_module, style
        for name, copy in getattr(module, _COPIES).items():
            yield f"{_COPIES}.{name}", copy, style
        return
    given = style.lifted if isinstance(style, Lifted) else style
    linears = [(kind, name) for kind in ("lora_A", "lora_B") for name in getattr(module, kind)]
    if (
        not isinstance(given, Block2DParallel | Colwise2D | Rowwise2D)
        or given.dataflow == STATIONARY
        or given.axes != TP_COL
    ):
        raise ValueError(
            f"{type(given).__name__} for a layer with adapters, {describe_module(module)}: its "
            f"adapters follow Colwise2D, Rowwise2D and Block2DParallel along {TP_COL} with a "
            f"weight that moves; name base_layer, lora_A.* and lora_B.* one by one"
        )
    usual = [forward_of(getattr(module, kind)[name]) is nn.Linear.forward for kind, name in linears]
    others = [
        name
        for name, child in module.named_children()
        if name not in _KNOWN and list(child.parameters())
    ]
    if not linears or not all(usual) or others or any(getattr(module, "use_dora", {}).values()):
        raise ValueError(
            f"{describe_module(module)} has adapters other than pairs of Linear lora_A and "
            f"lora_B {others}: name its parts in the plan one by one, or leave it out of "
            f"target_modules"
        )
    row_dim = given.row_dim
    local: dict[str, Any] = {"use_local_output": given.use_local_output, "row_dim": row_dim}
    come, leave = given.input_layouts, given.output_layouts
    if _splits_features(come):
        between = (come[0], Whole()) if _splits_features(leave) else leave
        down: GridStyle = Rowwise2D(
            input_layouts=come, output_layouts=between, reduce_dtype=given.reduce_dtype, **local
        )
    else:
        between = come
        down = Replicate(input_layouts=come, row_dim=row_dim)
    if _splits_features(leave):
        up: GridStyle = Colwise2D(
            input_layouts=between,
            output_layouts=leave,
            grad_layouts=given.grad_layouts,
            reduce_dtype=given.reduce_dtype,
            parts=given.parts,
            **local,
        )
    else:
        up = Replicate(
            input_layouts=between, output_layouts=leave, grad_layouts=given.grad_layouts, **local
        )
    yield "base_layer", module.base_layer, style
    styles = {"lora_A": down, "lora_B": up}
    for kind, name in linears:
        yield f"{kind}.{name}", getattr(module, kind)[name], styles[kind]
    for name, child in module.lora_dropout.items():
        if isinstance(child, nn.Dropout):
            before = Dropout2D(input_layouts=come, row_dim=row_dim)
            before.beside = [(module.in_features, come[1])]
            yield f"lora_dropout.{name}", child, before


def _splits_features(layout: Layout) -> bool:
    return layout[1] in (Shard(-1), Shard(2))
