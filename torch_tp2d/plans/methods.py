"""Adapts the methods of a Hugging Face model on a grid to what callers pass and read."""

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
"""The arguments that replace ids: the embedding's output for them."""


class AsTransformers(GridStyle):
    """Lets a model's methods be used as on one device: the plan's entry for it, ``""``.

    * ``inputs_embeds`` (``decoder_inputs_embeds``) as a plain tensor is the global ``[B, S, H]``,
      the same on every rank, as ids are, and so is its gradient. It goes on in the layout in which
      the embedding returns its output. A DTensor is taken as it is.
    * ``generate`` reads gathered logits, and beam search finds the keys and values of beams that
      another mesh row computed: where the beams of a sample lie on several mesh rows, caches are
      gathered along ``tp_row`` after each token.
    * ``resize_token_embeddings`` is refused: call it before the plan is applied.

    Example::

        >>> plan = {"model.embed_tokens": Block2DParallel(), ..., "": AsTransformers()}
    """

    is_hook = True
    places_inside = False

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Fits any module; methods that it does not have are left out."""

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        raise AssertionError("it runs no module")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        adapt(module, Grid(device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def adapt(module: nn.Module, grid: Grid) -> None:
    """Adapt the methods of a model as :class:`AsTransformers` says.

    The methods are bound to the model and read the grid from a closure, so that a copy of the model
    has methods of its own.
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
    """Run the model's own ``generate``, with the hooks that it needs for as long as it runs."""

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
    """Gather an encoder's states: they are repeated for each beam, and shards may be uneven."""
    states = output["last_hidden_state"]
    if isinstance(states, DTensor):
        output["last_hidden_state"] = states.redistribute(placements=[Replicate(), Replicate()])
    return output


def _layers(cache: Any) -> Iterator[Any]:
    """The layers of a cache of transformers, for an encoder-decoder those of both its caches."""
    kinds = "self_attention_cache", "cross_attention_cache"
    parts = [getattr(cache, kind) for kind in kinds if hasattr(cache, kind)]
    for part in parts or [cache]:
        yield from part.layers


def _own_beams(beams: Tensor, row: Axis) -> tuple[Tensor, tuple[int, ...] | None]:
    """Which sequences those of this mesh row continue, and among which they are counted.

    Args:
        beams: ``[B]``, over all mesh rows: for each sequence the one that it continues.

    Returns:
        Indices into this mesh row's sequences, and None; or, if any mesh row continues a sequence
        of another, indices into all sequences, and how many each mesh row has. A mesh row without
        sequences gets one stand-in index. All ranks decide from the same ``beams``, so that either
        all of them gather or none.
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
    """Replace a layer's cached keys and values by those that :func:`_own_beams` selected.

    Args:
        layer: holds this mesh row's keys and values, ``[B/R, heads, length, head_dim]``.
    """
    if not layer.get_seq_length():
        return
    if sizes is not None:
        layer.keys, layer.values = (
            all_gather(x[: sizes[row.index]], 0, sizes, row).wait()
            for x in (layer.keys, layer.values)
        )
    layer.reorder_cache(own)
