"""Losses of Hugging Face models whose logits are sharded over a grid."""

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
    """The ``model.loss_function`` of a Hugging Face causal LM: token s predicts token s + 1.

    Args:
        logits: a DTensor ``[B, S, V]``, in any layout.
        labels: ``[B, S]`` ids, the global ones on every rank; ``ignore_index`` marks labels that do
            not count.
        vocab_size: not used, since the logits tell it.
        num_items_in_batch: divides the sum, instead of the number of labels that count.
        shift_labels: labels that are shifted already, in place of ``labels``.

    Returns:
        A plain scalar, the same on every rank.

    Raises:
        TypeError: for plain logits. If you edit a plan so that its head returns gathered logits,
            remove the entry ``""``: the model's own loss is right for them.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    total = cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum")
    return total / num_items_in_batch


class LossFunction(AsTransformers):
    """Replaces a model's loss function: the plan's entry for the model itself, ``""``.

    It also adapts the model's methods, as :class:`AsTransformers` does.

    Args:
        function: becomes the module's ``loss_function``, which the models of transformers call
            with ``logits``, ``labels`` and ``vocab_size``.

    Example::

        >>> plan[""] = LossFunction(causal_lm_loss)
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

    If it is given ``labels=``, the model runs without them, and :func:`torch_tp2d.cross_entropy`
    computes the loss: the mean cross entropy of the logits over the labels that are not -100. A
    model that makes decoder inputs from labels (``prepare_decoder_input_ids_from_labels``) still
    does so. It also adapts the model's methods, as :class:`AsTransformers` does.
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
