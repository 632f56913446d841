"""What replaces ``scaled_dot_product_attention`` in an attention module on the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._tracing import in_graph
from ...comm import move
from ...mesh.grid import describe_mesh
from ...mesh.handed import notes_of
from ...mesh.layouts import Layout
from ...ops.attention import Heads, Order, Spec, gathered, ring
from ...ops.attention.block import attend_to_all, readable, repeat_heads
from ...ops.dropout import dropout
from ..masks import next_key
from ..module_kinds import describe_module
from ..provenance import check_made_of
from .blocks import SEQUENCE, two_phase_on
from .side_grads import check_rows, with_whole_grad
from .tokens import Tokens

if TYPE_CHECKING:
    from .runner import AttentionRunner

__all__ = ["Call"]


_SPLIT: Layout = Shard(0), Shard(1)
"""The layout of queries, keys and values as far as their gradients go: rows have other tokens, and
columns other heads, or replicated heads for queries of their own."""


class Call:
    """``scaled_dot_product_attention``, computed across the grid, for one call of the module."""

    def __init__(self, runner: AttentionRunner, module: nn.Module, tokens: Tokens) -> None:
        self.runner, self.module, self.tokens = runner, module, tokens
        self.grid = runner.grid
        self.happened = False

    @property
    def _here(self) -> str:
        return f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}"

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{self._here}: {why}")

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.happened = True
        runner, heads = self.runner, self.runner.heads
        local = [x for x in (query, key, value) if not isinstance(x, DTensor)]
        check_made_of(local, _SPLIT, self.module, self.grid)
        if attn_mask is not None and self.grid.context.watch is not None:
            self.grid.context.watch.attends(query, attn_mask)
        if attn_mask is not None and is_causal:
            raise self.refuse("attention takes an explicit mask or is_causal, not both")
        if attn_mask is not None and attn_mask.requires_grad:
            attn_mask = self._with_whole_grad(attn_mask, heads)
        if heads is not None and query.ndim == 4 and query.shape[1] == heads.query != heads.given:
            raise self.refuse(
                f"attention was called with a query of shape {tuple(query.shape)}, of all "
                f"{heads.query} heads, where each column has {heads.given}: name the attribute "
                f"that counts them, Attention2D(local_attributes=...), or let the code write -1 "
                f"for their number"
            )
        in_rows = runner.row_dim == 1
        plain = not in_rows and (heads is None or not heads.whole_key or self.grid.col.size == 1)
        if plain and not dropout_p:
            attn_mask = readable(self._of_own_heads(attn_mask, query, key, heads), query)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return _with_mask_in_graph(out, attn_mask)
        if any(x.ndim != 4 for x in (query, key, value)):
            raise self.refuse(
                f"attention across the grid takes [batch, heads, sequence, features], but got a "
                f"query of shape {tuple(query.shape)} and a key of shape {tuple(key.shape)}"
            )
        if heads is None:
            columns = self.grid.col.size
            heads = Heads(query.shape[1] * columns, key.shape[1] * columns, self.grid.col)
        shape = query.shape
        query, attn_mask = self._unpacked(query, attn_mask, heads)
        if query.shape[1] != heads.given:
            raise self.refuse(
                f"attention was called with a query of shape {tuple(query.shape)}, but "
                f"{heads.given} of {heads.query} heads were expected: {self._mend(heads)}"
            )
        try:
            key, value = heads.once(key), heads.once(value)
        except ValueError as error:
            raise self.refuse(f"{error}: {self._mend(heads)}") from None
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.ndim)]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        drop = self._dropout(dropout_p, heads) if dropout_p else None
        if in_rows:
            out = self._across(query, key, value, mask, is_causal, scale, heads, drop)
        else:
            query, key, value = heads.own_query(query), heads.own_key(key), heads.own_key(value)
            key, value = (repeat_heads(x, heads.index()) for x in (key, value))
            mask = None if mask is None else heads.own_query(mask)
            out = attend_to_all(query, key, value, mask, is_causal, scale, drop)
            out = _whole_heads(out, heads)
        return out if shape == query.shape else out.reshape(*shape[:-1], out.shape[-1])

    def _of_own_heads(
        self, mask: Tensor | None, query: Tensor, key: Tensor, heads: Heads | None
    ) -> Tensor | None:
        """This column's heads of a mask that has all of them, such as one of a table of biases."""
        if mask is None or isinstance(mask, DTensor) or mask.ndim < 3 or query.ndim != 4:
            return mask
        columns = self.grid.col.size
        heads = heads or Heads(query.shape[1] * columns, key.shape[1] * columns, self.grid.col)
        return heads.own_query(mask[(None,) * (4 - mask.ndim)])

    def _with_whole_grad(self, mask: Tensor, heads: Heads | None) -> Tensor:
        """A bias that learns and was made inside the module: one of its arguments has it already.

        In a graph nothing tells what it was made of. There one of this column's heads is left as it
        is: a module inside that made it so, such as a table split by heads, sums over the rows.
        """
        count = mask.shape[-3] if mask.ndim > 2 else 1
        # One head may be this column's only one, or for all heads: what it was made of tells.
        own_heads = count > 1 and (heads is None or count == heads.given != heads.query)
        # What no style has made is nobody's: T5 makes zeros that learn, for checkpointing.
        of_style = in_graph() or bool(notes_of(mask)[0])
        if isinstance(mask, DTensor) or not of_style or (own_heads and in_graph()):
            return mask
        here = f"{self._here}: a mask of shape {tuple(mask.shape)}"
        check_rows(mask, self.grid, here)
        return with_whole_grad(mask, (False, not own_heads), self.grid, here)

    def _dropout(self, p: float, heads: Heads) -> Callable[[Tensor], Tensor]:
        """Dropout of the attention weights ``[batch, heads, queries, keys]`` of this rank."""
        key, row, first = next_key(self.grid), self.grid.row, 0
        # Needed before drop() is called: the sizes may take a transfer, in which all ranks have to
        # take part, but a rank without queries has no weights to drop.
        lengths = self.tokens.lengths if self.runner.row_dim and row.size > 1 else None
        if self.runner.row_dim == 0:
            first = sum(row.split(self.tokens.extent(0))[: row.index])

        def drop(weights: Tensor) -> Tensor:
            size, count, queries, keys = weights.shape
            device = weights.device
            at, seen = (torch.arange(length, device=device) for length in (queries, keys))
            if lengths is not None:
                order = self._order(row.split(lengths[0]))
                at = order.positions(row.index, device)
                if lengths[0] == lengths[1]:
                    seen = order.positions(None, device)
            batch = torch.arange(first, first + size, device=device)
            own = torch.arange(heads.first, heads.first + count, device=device)
            return dropout(weights, key, p, [batch, own, at[:queries], seen])

        return drop

    def drop(self, x: Tensor, p: float) -> Tensor:
        """What replaces ``torch.nn.functional.dropout`` in the module."""
        if isinstance(x, DTensor) or x.ndim != 4:
            return self.runner.masks.drop(x, p)
        heads = self.runner.heads
        if heads is None:
            heads = Heads(x.shape[1] * self.grid.col.size, 1, self.grid.col)
        return self._dropout(p, heads)(x)

    def _order(self, sizes: Sequence[int]) -> Order:
        return Order.balanced(sizes) if self.runner.balanced else Order.contiguous(sizes)

    def _mend(self, heads: Heads) -> str:
        return (
            f"give the projections the styles of attention_projections({heads.query}, "
            f"{heads.key}, {heads.axis.size})"
        )

    def _unpacked(
        self, query: Tensor, mask: Tensor | None, heads: Heads
    ) -> tuple[Tensor, Tensor | None]:
        """Undo the reshape that Hugging Face applies to a query of one token with a mask.

        It takes such a query for a decoding step and reshapes it to ``[batch, key heads, queries
        per key head, features]``. Here it may be one row's part of a longer sequence.
        """
        if query.shape[1] == heads.given or query.shape[1] * query.shape[2] != heads.given:
            return query, mask
        size, first, second, features = query.shape
        if mask is not None and mask.ndim == 4 and mask.shape[1:3] == (first, second):
            mask = mask.reshape(mask.shape[0], first * second, 1, mask.shape[3])
        return query.reshape(size, first * second, 1, features), mask

    def _across(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        heads: Heads,
        drop: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Attention of this row's queries to the keys of all rows.

        With dropout, which needs the attention weights materialized, keys are gathered whatever the
        algorithm.
        """
        runner, row = self.runner, self.grid.row
        queries, keys = self.tokens.lengths
        whole = runner.algorithm == "local"
        sizes, key_sizes = row.split(queries), row.split(keys)
        here = sizes[row.index]
        for name, x, length, expected in (
            ("query", query, queries, here),
            ("key", key, keys, keys if whole else key_sizes[row.index]),
            ("value", value, keys, keys if whole else key_sizes[row.index]),
        ):
            # An empty part may hold one stand-in token, see Grid.with_stand_in.
            if x.shape[SEQUENCE] not in (expected, expected or 1):
                raise self.refuse(
                    f"attention was called with a {name} of shape {tuple(x.shape)}, but this "
                    f"row's part of a sequence of {length} is {expected} long: caches of past "
                    f"keys, and modules that change the sequence, need row_dim=0"
                )
        if getattr(self.module, "is_causal", False) and mask is None and query.shape[2] == 1:
            # Hugging Face takes a query of one token for a decoding step, which sees all keys, and
            # so does not ask for a causal mask.
            causal = causal or queries > 1
        if causal and queries != keys:
            raise self.refuse(
                f"is_causal with a sequence of {queries} attending to one of {keys} is not "
                f"supported where {row.name} splits the sequence: pass a mask"
            )
        if mask is not None:
            if runner.balanced:
                raise self.refuse(
                    "a mask was given for tokens in balanced order, where one made by index is "
                    "wrong: use balanced=False, or is_causal alone"
                )
            mask = self._mask(mask, sizes, keys, heads)
        # A row without tokens holds a stand-in, see Grid.with_stand_in.
        stands_in = not here and query.shape[SEQUENCE]
        if not here:
            query = query.narrow(SEQUENCE, 0, 0)
        if not key_sizes[row.index] and not whole:
            key, value = key.narrow(SEQUENCE, 0, 0), value.narrow(SEQUENCE, 0, 0)
        spec = Spec(
            axis=row,
            order=self._order(sizes),
            keys=None if queries == keys else key_sizes,
            causal=causal,
            scale=scale,
            heads=heads.index(of_all=runner.algorithm == "two_phase" and drop is None),
        )
        if runner.algorithm == "two_phase" and drop is None:
            if mask is not None and mask.shape[1] not in (1, heads.query):
                raise self.refuse(
                    f'algorithm="two_phase" computes all heads on every rank, but the mask has '
                    f'{mask.shape[1]} of {heads.query}: use "ring"'
                )
            size, features = query.shape[0], query.shape[3]
            out = two_phase_on(
                (query, key, value),
                (
                    (size, heads.query, queries, features),
                    (size, heads.key, keys, features),
                    (size, heads.key, keys, value.shape[3]),
                ),
                (
                    Replicate() if heads.whole_query else Shard(1),
                    Replicate() if heads.whole_key else Shard(1),
                ),
                mask,
                spec,
                self.grid,
                shares=True,
            )
        else:
            query, key, value = heads.own_query(query), heads.own_key(key), heads.own_key(value)
            mask = None if mask is None else heads.own_query(mask)
            if runner.algorithm == "ring" and drop is None:
                out = ring(query, key, value, mask, spec)
            else:
                out = gathered(query, key, value, mask, spec, whole=whole, drop=drop)
            out = _whole_heads(out, heads)
        if stands_in:
            stand_in = out.new_zeros(*out.shape[:2], 1, out.shape[3])
            out = torch.cat([out, stand_in], SEQUENCE)
        return out

    def _mask(self, mask: Tensor, sizes: Sequence[int], keys: int, heads: Heads) -> Tensor:
        """The part of a mask for this row's queries and all keys.

        Raises:
            ValueError: for a mask of another size.
        """
        index, queries = self.grid.row.index, sum(sizes)
        if mask.shape[-1] not in (1, keys) or mask.shape[-2] not in (
            1,
            queries,
            max(1, sizes[index]),
        ):
            raise self.refuse(
                f"attention was called with a mask of shape {tuple(mask.shape)}, but expected "
                f"{sizes[index]} rows, those of this row's queries of {queries}, and {keys} columns"
            )
        if mask.shape[1] not in (1, heads.given, heads.query):
            raise self.refuse(
                f"attention was called with a mask of shape {tuple(mask.shape)}, but expected 1 "
                f"or {heads.given} heads in its second dim"
            )
        if mask.shape[-2] == queries != 1:
            return mask.narrow(-2, sum(sizes[:index]), sizes[index])
        return mask if sizes[index] or mask.shape[-2] != 1 else mask.narrow(-2, 0, 0)


def _with_mask_in_graph(out: Tensor, mask: Tensor | None) -> Tensor:
    """An output of which a bias that learns is a part, though this rank has no samples.

    torch leaves it out of the graph of an empty output, and its backward sends.
    """
    if mask is None or not mask.requires_grad or out.numel():
        return out
    return out + mask.flatten()[:0].sum()


def _whole_heads(out: Tensor, heads: Heads) -> Tensor:
    """An output with all heads gathered, where the module expects all of them."""
    if not heads.whole_query:
        return out
    return move(out, heads.axis, Shard(1), Replicate(), {1: heads.sizes})
