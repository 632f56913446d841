"""Hugging Face's Swin: shifted windows, patch merging, relative position biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..loss import cross_entropy
from ..mesh.grid import describe_mesh
from ..styles.linear import Colwise2D, Rowwise2D
from ..styles.local import Local2D
from .losses import LossFunction
from .parts import Parts, Plan, inner_prefix

__all__ = ["image_classification_loss", "swin_plan"]


def image_classification_loss(
    labels: Tensor, pooled_logits: Tensor, config: Any = None, **_: Any
) -> Tensor:
    """The ``model.loss_function`` of a Hugging Face image classifier: one label for each image.

    Args:
        labels: ``[B]`` class ids, the global ones on every rank.
        pooled_logits: a DTensor ``[B, classes]``.

    Returns:
        A plain scalar, the same on every rank.
    """
    return cross_entropy(pooled_logits, labels)


def swin_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """The plan of ``SwinModel`` and ``SwinForImageClassification``.

    Every rank passes the global batch of images, of which each mesh row computes its own. The model
    puts the windows of all images into one dim, so tensors between modules are local: the images
    of this mesh row, replicated along ``tp_col``, over which heads and features are split. In a
    stage whose heads do not divide over ``tp_col``, each rank computes its shard of the projections
    and all heads of the attention itself. ``last_hidden_state``, ``pooler_output`` and ``logits``
    are DTensors of the global batch; hidden states and attentions, if asked for, are those of this
    mesh row.

    Args:
        model: a ``SwinModel`` or ``SwinForImageClassification``.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`. ``row_dim`` has to be 0, and the residual stream cannot be
            split by sequence.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for ``row_dim=1``, ``sequence_parallel=True`` or ``regather_input=True``, for
            dropout or a drop path, for a model with a mask token, and for any other model.

    Example::

        >>> plan = swin_plan(model, mesh["tp_row", "tp_col"])
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
        >>> model(pixel_values=images, labels=labels).loss.backward()
    """
    parts = Parts(**{"sequence_parallel": False, **options})
    _check(model, mesh, parts)
    base = inner_prefix(model)
    config: Any = model.config
    plan: Plan = {
        f"{base}embeddings.patch_embeddings.projection": Colwise2D(output_layouts=Replicate()),
        f"{base}embeddings.norm": Local2D(),
    }
    if config.use_absolute_embeddings:
        plan[f"{base}embeddings"] = Local2D()
    columns = mesh["tp_col"].size()
    for index, heads in enumerate(config.num_heads):
        stage = f"{base}encoder.layers.{index}"
        block = f"{stage}.blocks.*"
        # Every rank has all heads if they do not divide over the columns.
        on_col = Shard(-1) if heads % columns == 0 else Replicate()
        table = Shard(1) if heads % columns == 0 else Replicate()
        into_heads = Colwise2D(output_layouts=on_col, **parts.linear)
        plan |= {
            f"{block}.layernorm_before": Local2D(),
            f"{block}.attention.q_proj": into_heads,
            f"{block}.attention.k_proj": into_heads,
            f"{block}.attention.v_proj": into_heads,
            f"{block}.attention.relative_position_bias": Local2D(
                params={"relative_position_bias_table": table}
            ),
            f"{block}.attention.o_proj": Rowwise2D(input_layouts=on_col, **parts.linear),
            f"{block}.layernorm_after": Local2D(),
            f"{block}.mlp.fc1": Colwise2D(**parts.linear),
            f"{block}.mlp.fc2": Rowwise2D(**parts.linear),
        }
        if index + 1 < len(config.num_heads):
            plan |= {
                f"{stage}.downsample.norm": Local2D(),
                # The input is wider than the output, so Rowwise2D moves less than Colwise2D.
                f"{stage}.downsample.reduction": Rowwise2D(
                    input_layouts=Replicate(), **parts.linear
                ),
            }
    plan[f"{base}layernorm"] = Local2D(use_local_output=False)
    if getattr(model, "swin", model).pooler is not None:
        plan[f"{base}pooler"] = Local2D()
    if base:
        plan["classifier"] = parts.head()
        if parts.loss_parallel:
            plan[""] = LossFunction(image_classification_loss)
    return plan


def _check(model: nn.Module, mesh: DeviceMesh, parts: Parts) -> None:
    where = f"{type(model).__name__} on mesh {describe_mesh(mesh)}"
    if parts.row_dim != 0:
        raise ValueError(
            f"{where}: row_dim={parts.row_dim} splits each image over tp_row, but shifted windows "
            f"and patch merging take tokens from both sides of such a cut: use row_dim=0, which "
            f"splits the batch"
        )
    if parts.regather_input:
        raise ValueError(
            f"{where}: regather_input=True gathers tokens again, but those of images are whole "
            f"along tp_col: leave it out"
        )
    if parts.sequence_parallel:
        raise ValueError(
            f"{where}: sequence_parallel=True splits each image over tp_col, but windows are "
            f"made of whole images: leave it out"
        )
    config: Any = model.config
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    drawn = [name for name in rates if getattr(config, name)]
    if drawn:
        raise ValueError(
            f"{where}: {drawn[0]}={getattr(config, drawn[0])}, but what ranks draw at random for "
            f"windows and images is not kept in step: make the model with {drawn[0]}=0.0 (it "
            f"changes no weight)"
        )
    inner = getattr(model, "swin", model)
    known = inner is model or isinstance(getattr(model, "classifier", None), nn.Linear)
    if not known or not hasattr(inner, "layernorm") or not hasattr(inner, "encoder"):
        raise ValueError(
            f"{where}: there is a plan for SwinModel and SwinForImageClassification: put a head "
            f"of your own on a SwinModel"
        )
    if getattr(inner.embeddings, "mask_token", None) is not None:
        raise ValueError(
            f"{where}: it has a mask token, and masks of whole batches do not fit a row's "
            f"images: make it with use_mask_token=False"
        )
