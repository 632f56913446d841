"""What the methods of a Hugging Face model take and read, of a model that lies on a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..comm import Axis, all_gather
from ..mesh.grid import Grid, describe_mesh
from ..styles.base import GridStyle, Runner
from ..styles.embedding import EmbeddingRunner
from .experts import refuse_router_losses

__all__ = ["AsTransformers"]

EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")
"""The arguments that stand for ids: what an embedding would have made of them."""


class AsTransformers(GridStyle):
    """A model whose methods are used as transformers has them: the plan's entry for it, ``""``.

    * ``inputs_embeds`` (``decoder_inputs_embeds``) that are plain tensors are whole, ``[B, S, H]``,
      the same on every rank, as ids are; so is their gradient. They go on as the embedding hands on
      what it looked up. A DTensor is taken as it is.
    * ``generate`` reads whole logits, and beam search finds the keys and values of beams that
      another row computed: where the beams of a sample lie on several rows, caches are gathered
      along ``tp_row`` after each token.
    * ``resize_token_embeddings`` is refused: before the plan it does what it should.

    Example::

        >>> plan = {"model.embed_tokens": Block2DParallel(), ..., "": AsTransformers()}
    """

    is_hook = True
    places_inside = False

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Fits any module: what it has not is left out."""

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        raise AssertionError("it runs no module")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        adapt(module, Grid(device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def adapt(module: nn.Module, grid: Grid) -> None:
    """Have the methods of a model do what :class:`AsTransformers` says.

    They are bound anew and read the grid from a closure, so that a copy of the model has its own.
    """

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _generate(model, grid, *args, **kwargs)

    def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{type(model).__name__} on mesh {describe_mesh(grid.mesh)} has its embedding and its "
            f"head in shards: call resize_token_embeddings before parallelize_module"
        )

    for method in (generate, resize_token_embeddings):
        if callable(getattr(module, method.__name__, None)):
            setattr(module, method.__name__, MethodType(method, module))

    def prepare(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        refuse_router_losses(model, kwargs.get("output_router_logits"))
        given = {name: kwargs[name] for name in EMBEDDED if kwargs.get(name) is not None}
        if not given:
            return args, kwargs
        embedding = getattr(model.get_input_embeddings(), "_tp2d", None)
        for name, x in given.items():
            if isinstance(embedding, EmbeddingRunner) and not isinstance(x, DTensor):
                given[name] = embedding.hand_on(x)
        return args, {**kwargs, **given}

    if callable(getattr(module, "get_input_embeddings", None)):
        module.register_forward_pre_hook(prepare, with_kwargs=True)


def _generate(model: Any, grid: Grid, *args: Any, **kwargs: Any) -> Any:
    """The model's own ``generate``, for as long as which it has what that needs."""

    def reorder(cache: Any, beams: Tensor) -> Any:
        own, sizes = _own_beams(beams, grid.row)
        for layer in _layers(cache):
            _reorder(layer, own, sizes, grid.row)
        return cache

    hooks = [model.register_forward_hook(_whole_logits)]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        hooks.append(model.get_encoder().register_forward_hook(_whole_states))
    reorders = grid.row.size > 1 and not hasattr(model, "_reorder_cache")
    if reorders:
        model._reorder_cache = reorder
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        if reorders:
            del model._reorder_cache


def _whole_logits(module: nn.Module, args: Any, output: Any) -> Any:
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(logits, DTensor):
        output["logits"] = logits.full_tensor()
    return output


def _whole_states(module: nn.Module, args: Any, output: Any) -> Any:
    """An encoder's, which are repeated for each beam: not in shards, which may be uneven."""
    states = output["last_hidden_state"]
    if isinstance(states, DTensor):
        output["last_hidden_state"] = states.redistribute(placements=[Replicate(), Replicate()])
    return output


def _layers(cache: Any) -> Iterator[Any]:
    """The layers of a cache of transformers; of an encoder-decoder's those of both caches."""
    kinds = "self_attention_cache", "cross_attention_cache"
    parts = [getattr(cache, kind) for kind in kinds if hasattr(cache, kind)]
    for part in parts or [cache]:
        yield from part.layers


def _own_beams(beams: Tensor, row: Axis) -> tuple[Tensor, tuple[int, ...] | None]:
    """Which sequences those of this row go on from, and where they are looked for.

    Args:
        beams: ``[B]``, of all rows: for each sequence the one that it goes on from.

    Returns:
        Their numbers among those of this row, and None; or, where a row goes on from another's,
        their numbers among all, and how many each row has. A row without a sequence has one that
        stands in for none. By what all ranks know, so that all of them gather, or none.
    """
    sizes = row.split(len(beams))
    starts = [sum(sizes[:r]) for r in range(row.size)]
    own = beams[starts[row.index] :][: sizes[row.index]]
    if not len(own):
        own = torch.zeros_like(beams[:1])
    elsewhere = any(
        not start <= beam < start + size
        for start, size in zip(starts, sizes, strict=True)
        for beam in beams[start : start + size].tolist()
    )
    if elsewhere:
        return own, sizes
    return (own - starts[row.index] if sizes[row.index] else own), None


def _reorder(layer: Any, own: Tensor, sizes: tuple[int, ...] | None, row: Axis) -> None:
    """Leave in a layer's cache the keys and values that :func:`_own_beams` says.

    Args:
        layer: its keys and values are this row's, ``[B/R, heads, length, head_dim]``.
    """
    if not layer.get_seq_length():
        return
    if sizes is not None:
        layer.keys, layer.values = (
            all_gather(x[: sizes[row.index]], 0, sizes, row).wait()
            for x in (layer.keys, layer.values)
        )
    layer.reorder_cache(own)
