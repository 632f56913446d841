"""Losses of Hugging Face models, of logits that lie on a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..loss import cross_entropy
from ..mesh.grid import Grid
from ..styles.base import GridStyle, Runner
from .methods import AsTransformers, adapt

__all__ = ["LossFunction", "LossOfLabels", "causal_lm_loss"]


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What a Hugging Face causal LM takes as ``model.loss_function``: token s predicts token s + 1.

    Args:
        logits: a DTensor ``[B, S, V]``, split in any way.
        labels: ``[B, S]`` ids, whole on every rank; those of ``ignore_index`` count for nothing.
        vocab_size: the logits have it, so it is not used.
        num_items_in_batch: divides the sum, instead of the number of labels that count.
        shift_labels: labels that are shifted already.

    Returns:
        A plain scalar, the same on every rank.

    Raises:
        TypeError: for plain logits. Where a plan is edited so that its head gives whole ones, leave
            its entry ``""`` out: the model's own loss is right for them.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    total = cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum")
    return total / num_items_in_batch


class LossFunction(AsTransformers):
    """Sets what a model computes its loss by: the plan's entry for the model itself, ``""``.

    Its methods are as :class:`AsTransformers` has them.

    Args:
        function: becomes the module's ``loss_function``, which the models of transformers call
            with ``logits``, ``labels`` and ``vocab_size``.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.loss_function = self.function  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"LossFunction({self.function.__name__})"


class LossOfLabels(GridStyle):
    """For a model that computes its loss in its own forward: the plan's entry for ``""``.

    Given ``labels=``, the model runs without them and the loss, the mean cross entropy of its
    logits over the labels that are not -100, is that of :func:`torch_tp2d.cross_entropy`. A model
    that makes its decoder's inputs of the labels (``prepare_decoder_input_ids_from_labels``) does.
    Its methods are as :class:`AsTransformers` has them.
    """

    is_hook = True

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Fits any module."""

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        adapt(module, grid)
        return _LossRunner()


class _LossRunner(Runner):
    style = "LossOfLabels"

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        if labels is None:
            return forward(*args, **kwargs)
        shifted = getattr(module, "prepare_decoder_input_ids_from_labels", None)
        names = ("decoder_input_ids", "decoder_inputs_embeds")
        if shifted is not None and len(args) < 3 and all(kwargs.get(n) is None for n in names):
            kwargs["decoder_input_ids"] = shifted(labels)
        outputs = forward(*args, **kwargs)
        if isinstance(outputs, tuple):
            return cross_entropy(outputs[0], labels), *outputs
        return type(outputs)(loss=cross_entropy(outputs["logits"], labels), **outputs)
