"""Hugging Face's T5: ``T5ForConditionalGeneration``, ``T5Model`` and ``T5EncoderModel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .._tracing import in_graph
from ..mesh.grid import Grid, check_mesh, describe_mesh
from ..mesh.handed import Handed, hand_out
from ..mesh.layouts import TP_COL, TP_ROW, Layout
from ..styles.attention import Attention2D
from ..styles.base import GridStyle, Resolved, Runner
from ..styles.dtensors import local_shards
from ..styles.local_math import sum_grads
from ..styles.module_kinds import describe_module, is_embedding
from .losses import LossOfLabels
from .methods import AsTransformers
from .parts import Parts, Plan

__all__ = ["HeadBias", "RelativeAttention2D", "t5_plan"]


class HeadBias(GridStyle):
    """A table ``[buckets, heads]`` of biases of attention scores, split by heads over ``tp_col``.

    For an ``nn.Embedding`` inside an attention module whose style is :class:`Attention2D`: the
    module looks up ids that it makes itself, and gets the biases of this column's heads. Only the
    table's gradient is communicated: it is summed along ``tp_row``.

    Keyword Args:
        whole: replicate the table, so that the module sees all heads, for heads that do not divide
            over ``tp_col``. Each rank's gradient is then partial along ``tp_col`` too, and is
            summed along it.

    Raises:
        TypeError: when applied to anything but an ``nn.Embedding``.
        ValueError: if the heads do not divide over ``tp_col`` and ``whole`` is not set.

    Example::

        >>> plan["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] = HeadBias()
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.layout: Layout = Replicate(), Replicate() if whole else Shard(1)

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        if not is_embedding(module):
            raise TypeError(f"HeadBias is for an nn.Embedding, not {describe_module(module)}")
        heads: Any = module.embedding_dim
        if isinstance(self.layout[1], Shard) and heads % grid.col.size:
            raise ValueError(
                f"{describe_module(module)} is a bias of {heads} heads, which do not divide over "
                f"{grid.col.name}={grid.col.size}: use HeadBias(whole=True)"
            )

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", self.layout

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _HeadBiasRunner(self.layout, grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(whole={isinstance(self.layout[1], Replicate)})"


class _HeadBiasRunner(Runner):
    style = "HeadBias"

    def __init__(self, layout: Layout, grid: Grid) -> None:
        axes = zip((grid.row, grid.col), layout, strict=True)
        self.context = grid.context
        self.axes = [axis for axis, p in axes if isinstance(p, Replicate) and axis.size > 1]

    def run(self, module: Any, forward: Callable[..., Any], ids: Tensor) -> Tensor:
        (weight,) = sum_grads(local_shards(module.weight), self.axes, self.context)
        bias = F.embedding(ids, weight)
        return bias if in_graph() else hand_out(bias, Handed(sums=frozenset((TP_ROW, TP_COL))))


class RelativeAttention2D(Attention2D):
    """:class:`torch_tp2d.Attention2D` for T5's attention, which adds a bias to the scores.

    The first block of a stack computes the bias of this column's heads from the distances between
    queries and keys, and passes it on to the other blocks. If ``tp_row`` splits the sequence
    (``row_dim=1``), the bias is of this mesh row's queries and all keys.

    Example::

        >>> plan["encoder.block.*.layer.0.SelfAttention"] = RelativeAttention2D(num_heads=8)
    """

    summed_inputs = frozenset(("position_bias",))

    def check_positions(self, module: nn.Module, grid: Grid) -> None:
        """Accept any layout of the positions in which the attention itself is right.

        Raises:
            ValueError: for ``row_dim=1`` if the model does not compute its attention by
                ``scaled_dot_product_attention``.
        """
        how = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
        if self.row_dim == 1 and grid.row.size > 1 and how != "sdpa":
            raise ValueError(
                f"{describe_module(module)} computes its attention by {how!r}, of the keys that it "
                f"sees, which are a part where {grid.row.name} splits the sequence: make the model "
                f'with attn_implementation="sdpa", or use row_dim=0'
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _RelativeRunner(super().runner(module, grid), grid, self.row_dim)


class _RelativeRunner(Runner):
    style = "RelativeAttention2D"

    def __init__(self, attention: Runner, grid: Grid, row_dim: int) -> None:
        self.attention, self.grid = attention, grid
        self.in_rows = row_dim == 1 and grid.row.size > 1

    def resolved(self) -> Resolved:
        return self.attention.resolved()

    def installed(self, module: nn.Module) -> None:
        self.attention.installed(module)

    def run(
        self,
        module: Any,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.in_rows:
            own_keys = past_key_values if key_value_states is None else None
            if own_keys is not None and own_keys.get_seq_length(module.layer_idx):
                raise ValueError(
                    f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: past keys "
                    f"are not supported where {self.grid.row.name} splits the sequence: use "
                    f"row_dim=0"
                )
            part = self._part(module, hidden_states, key_value_states)
            if position_bias is None:
                position_bias = part.bias(module)
            if mask is None and module.is_causal and key_value_states is None:
                # The module would make a mask for the local lengths.
                mask = part.causal_mask()
        return self.attention.run(
            module,
            forward,
            hidden_states,
            mask=mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )

    def _part(self, module: Any, hidden: Tensor, states: Tensor | None) -> _Part:
        sizes = [self.grid.sizes_of(x) for x in (hidden, hidden if states is None else states)]
        if None in sizes:
            raise TypeError(
                f"{describe_module(module)}: hidden states of shape {tuple(hidden.shape)} do not "
                f"say how long the whole sequence is: give the norm before use_local_output=False"
            )
        queries, keys = (size[1] for size in sizes if size is not None)
        rows, index = self.grid.row.split(queries), self.grid.row.index
        # A mesh row without tokens has one stand-in token.
        return _Part(sum(rows[:index]), max(1, rows[index]), keys, hidden)


class _Part(NamedTuple):
    """The part of the scores that this mesh row computes: its queries, and all keys.

    ``queries`` and ``keys`` are numbers of tokens, ``start`` is the position of the first query;
    ``hidden`` tells dtype and device.
    """

    start: int
    queries: int
    keys: int
    hidden: Tensor

    def bias(self, module: Any) -> Tensor:
        """The bias ``[1, heads, queries, keys]``, which is added to the scores."""
        start, queries, keys, hidden = self
        if not module.has_relative_attention_bias:
            return torch.zeros(1, 1, queries, keys, dtype=hidden.dtype, device=hidden.device)
        bias: Tensor = module.compute_bias(
            queries, keys, device=hidden.device, past_seen_tokens=start
        )
        return bias

    def causal_mask(self) -> Tensor:
        """The mask ``[1, 1, queries, keys]``, True where a query sees a key."""
        start, queries, keys, hidden = self
        at = torch.arange(start, start + queries, device=hidden.device)
        return (at[:, None] >= torch.arange(keys, device=hidden.device))[None, None]


def t5_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """The plan of a T5 with both stacks, or with its encoder alone.

    Encoder and decoder may have sequences of different lengths. With ``row_dim=1`` the model has
    to compute its attention by ``scaled_dot_product_attention`` (the default in transformers).

    Args:
        model: a ``T5ForConditionalGeneration``, ``T5Model`` or ``T5EncoderModel``, with gated
            feed-forward layers or plain ones.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for a mesh or an option that cannot work.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> parallelize_module(model, mesh, t5_plan(model, mesh))
        >>> model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    """
    parts = Parts(**options)
    check_mesh(mesh)
    config: Any = model.config
    _, q, kv, o = parts.attention(mesh, config.num_heads)
    divides = config.num_heads % mesh[TP_COL].size() == 0
    plan: Plan = {"shared": parts.embedding()}
    for stack in ("encoder", "decoder"):
        if not hasattr(model, stack):
            continue
        block = f"{stack}.block.*"
        kinds = ["layer.0.SelfAttention"]
        if stack == "decoder":
            kinds.append("layer.1.EncDecAttention")
        plan[f"{stack}.embed_tokens"] = parts.embedding()
        for attention in kinds:
            plan[f"{block}.{attention}"] = RelativeAttention2D(
                row_dim=parts.row_dim, num_heads=config.num_heads
            )
            plan[f"{block}.{attention}.q"] = q
            plan[f"{block}.{attention}.k"] = kv
            plan[f"{block}.{attention}.v"] = kv
            plan[f"{block}.{attention}.o"] = o
        # Only the first block has the table; it passes the bias on to the others.
        plan[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = HeadBias(
            whole=not divides
        )
        plan[f"{block}.layer.*.layer_norm"] = parts.norm()
        plan[f"{block}.layer.*.DenseReluDense.wi*"] = parts.colwise()
        plan[f"{block}.layer.*.DenseReluDense.wo"] = parts.rowwise()
        plan[f"{stack}.final_layer_norm"] = parts.norm()
    if hasattr(model, "lm_head"):
        plan["lm_head"] = parts.head()
    own = "lm_head" in plan and parts.loss_parallel
    plan[""] = LossOfLabels() if own else AsTransformers()
    return plan
