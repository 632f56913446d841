"""The style for attention modules: DTensors of the global shape outside, local heads inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from .comm import move
from .edges import gather_for_module
from .grid import Grid, describe_mesh
from .layouts import Layout, as_layout, check_row_dim, normalize, row_layout
from .recognise import describe_module
from .styles import Colwise2D, GridStyle, LayoutLike, Rowwise2D, Runner

__all__ = ["Attention2D", "Projections", "attention_projections"]

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim")


@dataclass(frozen=True)
class _Heads:
    """Which heads there are and which of them this rank computes.

    ``whole_q`` and ``whole_kv``: the projections leave all heads on every rank along ``tp_col``,
    and each rank computes its share of them.
    """

    query: int | None
    key: int | None
    columns: int

    @property
    def whole_q(self) -> bool:
        return self.query is not None and self.query % self.columns != 0

    @property
    def whole_kv(self) -> bool:
        return self.whole_q or (self.key is not None and self.key % self.columns != 0)


class Projections(NamedTuple):
    """The styles of an attention module's projections."""

    q: Colwise2D
    kv: Colwise2D
    o: Rowwise2D


def attention_projections(
    num_heads: int,
    num_kv_heads: int | None,
    columns: int,
    *,
    row_dim: int = 0,
    output_layouts: LayoutLike = None,
    use_local_output: bool = False,
) -> Projections:
    """The styles of the projections inside a module whose style is :class:`Attention2D`.

    Heads that divide over ``tp_col`` are split over it. Key and value heads that do not are whole
    on every rank, and so is everything where the query heads do not; what a rank computes of it
    is a share, so the gradients of whole projections are summed.

    Args:
        num_heads: query heads of the model.
        num_kv_heads: key and value heads; None for as many.
        columns: the size of ``tp_col``.
        row_dim: the token dim that ``tp_row`` splits.
        output_layouts: of the output projection, ``Shard(1)`` by default: the token layout.
        use_local_output: of the output projection.

    Returns:
        ``(q, kv, o)``.

    Raises:
        ValueError: if the query heads are no multiple of the key and value heads.

    Example::

        >>> q, kv, o = attention_projections(32, 8, mesh["tp_col"].size())
        >>> plan = {"layers.*.self_attn": Attention2D(),
        ...         "layers.*.self_attn.q_proj": q,
        ...         "layers.*.self_attn.[kv]_proj": kv,
        ...         "layers.*.self_attn.o_proj": o}
    """
    _check_groups(num_heads, num_kv_heads)
    heads = _Heads(num_heads, num_heads if num_kv_heads is None else num_kv_heads, columns)

    def into_heads(whole: bool) -> Colwise2D:
        if not whole:
            return Colwise2D(row_dim=row_dim)
        return Colwise2D(
            row_dim=row_dim,
            output_layouts=Replicate(),
            grad_layouts=(Shard(row_dim), Partial()),
        )

    return Projections(
        into_heads(heads.whole_q),
        into_heads(heads.whole_kv),
        Rowwise2D(
            row_dim=row_dim,
            input_layouts=Replicate() if heads.whole_q else Shard(-1),
            output_layouts=Shard(1) if output_layouts is None else output_layouts,
            use_local_output=use_local_output,
        ),
    )


def _check_groups(num_heads: int, num_kv_heads: int | None) -> None:
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are no multiple of {num_kv_heads} key and value heads"
        )


class Attention2D(GridStyle):
    """Run an attention module on its own heads and tokens, inside a model of DTensors.

    The module's projections have styles of their own (:func:`attention_projections` gives them);
    this one is for the module around them. A model that no one wrote for tensor parallelism needs
    no edit: between modules its code sees DTensors of the global shape, inside this module local
    tensors, of this row's tokens and this column's heads.

    * The floating point DTensors that the module is given (hidden states, states to attend to) are
      gathered along ``tp_col``, once for all the projections.
    * Plain tensors (masks, rotary tables, position ids) are taken to be whole, as made from
      global shapes, and are cut to this row's tokens and this column's heads. See ``whole_inputs``.
    * Integer attributes that count heads are divided by the size of ``tp_col``.
    * Key and value heads that do not divide over ``tp_col``, and query heads that do not, are whole
      in the module, and ``scaled_dot_product_attention`` computes this column's share of them.

    Keyword Args:
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        num_heads, num_kv_heads: of the whole module. By default read from its attributes, or from
            its ``config``.
        local_attributes: the module's attributes to divide by the size of ``tp_col``. By default
            the usual names for numbers of heads and for their width all together.
        input_layouts: layout of local hidden states, ``Replicate()`` by default: a single
            Placement is the one on ``tp_col``.

    Raises:
        ValueError: when applied, if the heads cannot be split; in forward, if the module computes
            its attention where the style cannot reach it and that would be wrong.

    Example::

        >>> q, kv, o = attention_projections(num_heads, num_kv_heads, mesh["tp_col"].size())
        >>> plan = {"model.layers.*.self_attn": Attention2D(),
        ...         "model.layers.*.self_attn.q_proj": q,
        ...         "model.layers.*.self_attn.[kv]_proj": kv,
        ...         "model.layers.*.self_attn.o_proj": o}
    """

    places_inside = False

    def __init__(
        self,
        *,
        row_dim: int = 0,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        local_attributes: Iterable[str] | None = None,
        input_layouts: LayoutLike = None,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        if row_dim != 0:
            raise ValueError("attention across rows (row_dim=1) is not there yet")
        if num_heads is not None:
            _check_groups(num_heads, num_kv_heads)
        self.row_dim = row_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.local_attributes = None if local_attributes is None else tuple(local_attributes)
        self.input_layouts = as_layout(input_layouts, row_layout(row_dim), row=Shard(row_dim))

    def heads(self, module: nn.Module, columns: int) -> _Heads:
        """The heads of a module that is not divided yet."""
        query = _count(module, _HEADS) if self.num_heads is None else self.num_heads
        key = _count(module, _KV_HEADS) if self.num_kv_heads is None else self.num_kv_heads
        return _Heads(query, query if key is None else key, columns)

    def local_values(self, module: nn.Module, columns: int) -> dict[str, int]:
        """The attributes that this style changes, with their new values.

        Raises:
            ValueError: for a given attribute that is no multiple of ``columns``.
        """
        if self.local_attributes is not None:
            values = {name: getattr(module, name, None) for name in self.local_attributes}
            for name, value in values.items():
                if not isinstance(value, int) or value % columns:
                    raise ValueError(
                        f"{describe_module(module)}: {name} is {value!r}, which cannot be divided "
                        f"by tp_col={columns}: leave it out of local_attributes"
                    )
            return {name: value // columns for name, value in values.items()}
        heads = self.heads(module, columns)
        if heads.whole_q:
            return {}
        names = _HEADS + _WIDTHS
        if not heads.whole_kv:
            names += _KV_HEADS
        elif heads.key == 1:
            names += _GROUPS
        values = {name: getattr(module, name, None) for name in names}
        return {
            name: value // columns
            for name, value in values.items()
            if type(value) is int and value % columns == 0
        }

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        self.local_values(module, grid.col.size)
        heads = self.heads(module, grid.col.size)
        if heads.query is not None:
            try:
                _check_groups(heads.query, heads.key)
            except ValueError as error:
                raise ValueError(f"{describe_module(module)}: {error}") from None

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _AttentionRunner(self, module, grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(row_dim={self.row_dim})"


def _count(module: nn.Module, names: Iterable[str]) -> int | None:
    """The first of the attributes that the module, or its config, has as a number."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None


class _Intercept(TorchFunctionMode):
    """Has another function compute ``scaled_dot_product_attention`` while it is entered."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.compute(*args, **(kwargs or {}))


class _AttentionRunner(Runner):
    style = "Attention2D"

    def __init__(self, style: Attention2D, module: nn.Module, grid: Grid) -> None:
        self.grid = grid
        self.row_dim = style.row_dim
        self.declared = style.input_layouts
        self.heads = style.heads(module, grid.col.size)
        self.local_values = style.local_values(module, grid.col.size)

    def installed(self, module: nn.Module) -> None:
        for name, value in self.local_values.items():
            setattr(module, name, value)

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(module, args, kwargs)
        tokens = _Tokens(hidden, self.declared, self.grid, self.row_dim)

        def enter(value: Any, name: str) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(enter(item, name) for item in value)
            if not isinstance(value, Tensor):
                return value
            if value is hidden or (isinstance(value, DTensor) and tokens.are_in(value)):
                return tokens.gather(value)
            return tokens.cut(value, name, self.heads, module)

        args = tuple(enter(value, f"argument {index}") for index, value in enumerate(args))
        kwargs = {name: enter(value, name) for name, value in kwargs.items()}
        intercept = _Intercept(lambda *a, **kw: self.attend(module, *a, **kw))
        with intercept:
            result = forward(*args, **kwargs)
        if not intercept.calls and self.grid.col.size > 1 and self._shares():
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: its "
                f"{self.heads.query} query heads and {self.heads.key} key heads do not divide over "
                f"{self.grid.col.name}, so each rank has to compute a share of them, but it did "
                f"not call scaled_dot_product_attention: have it do so (Hugging Face: "
                f'attn_implementation="sdpa"), or use a mesh whose {self.grid.col.name} divides '
                f"the heads"
            )
        return result

    def _shares(self) -> bool:
        """Whether attention on what the projections give would be wrong as it stands."""
        if self.heads.whole_q:
            return True
        # With one key head, the number of groups was divided and all is as it should be.
        return self.heads.whole_kv and self.heads.key != 1

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What the module gets for ``scaled_dot_product_attention``, with its arguments."""
        if dropout_p > 0:
            raise ValueError(
                f"{describe_module(module)}: dropout of {dropout_p} inside attention is not "
                f"supported on a grid yet: set the model's attention dropout to 0"
            )
        col, heads = self.grid.col, self.heads
        if col.size == 1 or not heads.whole_kv or heads.query is None or heads.key is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        given = heads.query if heads.whole_q else heads.query // col.size
        if query.ndim != 4 or query.shape[1] != given:
            raise ValueError(
                f"{describe_module(module)}: attention was called with a query of shape "
                f"{tuple(query.shape)}, but expected [batch, {given} heads, sequence, features] of "
                f"{heads.query} heads on {describe_mesh(self.grid.mesh)}: give the projections the "
                f"styles of attention_projections({heads.query}, {heads.key}, {col.size})"
            )
        sizes = col.split(heads.query)
        start, count = sum(sizes[: col.index]), sizes[col.index]
        if heads.whole_q:
            query = query.narrow(1, start, count)
            if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == heads.query:
                attn_mask = attn_mask.narrow(-3, start, count)
        key, value = (self._own(x, start, count, module) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=True
        )
        if heads.whole_q:
            out = move(out, col, Shard(1), Replicate(), {1: sizes})
        return out

    def _own(self, x: Tensor, start: int, count: int, module: nn.Module) -> Tensor:
        """The key or value heads of query heads ``start`` to ``start + count``.

        What is left out has a gradient of zero here: it is a share, summed by the projection.
        """
        query, key = self.heads.query, self.heads.key
        assert query is not None and key is not None
        if key == 1 and x.shape[1] == count:
            return x
        if x.shape[1] == query:
            return x.narrow(1, start, count)
        if x.shape[1] != key:
            raise ValueError(
                f"{describe_module(module)}: attention was called with a key or value of shape "
                f"{tuple(x.shape)}, but expected all of its {key} heads: give the projections the "
                f"styles of attention_projections({query}, {key}, {self.grid.col.size})"
            )
        group = query // key
        if not count:
            return x.narrow(1, 0, 0)
        first, last = start // group, (start + count - 1) // group
        if first == last or (start % group == 0 and count % group == 0):
            return x.narrow(1, first, last - first + 1)
        return x[:, [head // group for head in range(start, start + count)]]


def _hidden_states(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return value
    raise TypeError(
        f"{describe_module(module)}: Attention2D needs hidden states, a floating point tensor "
        f"[batch, sequence, hidden], as an argument"
    )


class _Tokens:
    """The tokens that an attention module is given, and this row's part of them."""

    def __init__(self, hidden: Tensor, declared: Layout, grid: Grid, row_dim: int) -> None:
        self.hidden, self.declared = hidden, declared
        self.grid, self.row_dim = grid, row_dim
        self.shape: tuple[int, int] | None = None
        if isinstance(hidden, DTensor) and hidden.device_mesh == grid.mesh:
            self.shape = hidden.shape[0], hidden.shape[1]
            # A model may have several streams of tokens: this is the one under way now.
            grid.tokens.shape = self.shape

    def extent(self, dim: int) -> int:
        """Batch (0) or sequence (1) of all tokens."""
        if self.shape is not None:
            return self.shape[dim]
        if isinstance(self.hidden, DTensor):
            layout, local = self.grid.layout(self.hidden, self.row_dim), self.hidden.to_local()
        else:
            layout, local = self.declared, self.hidden
        return self.grid.extent(self.grid.without_stand_in(local, layout), dim, layout)

    def are_in(self, x: DTensor) -> bool:
        """Whether a DTensor is a stream of tokens, ``[batch, sequence, hidden]``."""
        return x.is_floating_point() and x.ndim == 3 and x.shape[0] == self.hidden.shape[0]

    def gather(self, x: Tensor) -> Tensor:
        """This row's tokens, whole in the hidden dim."""
        shape: Sequence[int] | None = None
        if isinstance(x, DTensor):
            layout = normalize(self.grid.layout(x, self.row_dim), x.ndim)
            shape = tuple(x.shape) if x.device_mesh == self.grid.mesh else None
            x = x.to_local()
        else:
            layout = normalize(self.declared, x.ndim)
            x = self.grid.without_stand_in(x, layout)
        row = Shard(self.row_dim)
        if layout[0] != row:
            x = self.grid.redistribute(x, layout, (row, layout[1]), shape=shape)
            layout = row, layout[1]
        return gather_for_module(x, layout, self.grid, shape)

    def cut(self, x: Tensor, name: str, heads: _Heads, module: nn.Module) -> Tensor:
        """This row's and column's part of a tensor that is whole."""
        row, col = self.grid.row, self.grid.col
        row_dim = 0 if x.ndim > 2 or (x.ndim == 2 and not x.is_floating_point()) else None
        placements: list[Placement] = [Replicate(), Replicate()]
        if row_dim is not None and row.size > 1 and x.shape[row_dim] != 1:
            placements[0] = self._row(x, row_dim, name, module)
        local = not heads.whole_q and heads.query is not None and col.size > 1
        if local and x.ndim == 4 and x.shape[1] == heads.query:
            placements[1] = Shard(1)
        if isinstance(x, DTensor):
            if not isinstance(placements[1], Shard) or not isinstance(placements[0], Shard):
                grads = [Partial() if isinstance(p, Replicate) else p for p in placements]
            else:
                grads = placements
            x = x.redistribute(placements=placements)
            return x.to_local(grad_placements=grads if x.is_floating_point() else None)
        for axis, placement in zip((row, col), placements, strict=True):
            if isinstance(placement, Shard):
                sizes = axis.split(x.shape[placement.dim])
                start, count = sum(sizes[: axis.index]), sizes[axis.index]
                if not count:
                    # What stands in for a row without tokens.
                    start, count = 0, 1
                x = x.narrow(placement.dim, start, count)
        return x

    def _row(self, x: Tensor, dim: int, name: str, module: nn.Module) -> Placement:
        whole = self.extent(0)
        if x.shape[dim] == whole:
            return Shard(dim)
        if not isinstance(x, DTensor) and x.shape[dim] == max(
            1, self.grid.row.split(whole)[self.grid.row.index]
        ):
            return Replicate()
        raise ValueError(
            f"{describe_module(module)}: {name} has shape {tuple(x.shape)}, but the batch is "
            f"{whole} on {describe_mesh(self.grid.mesh)}: pass it whole, of batch 1, or cut to "
            f"this row's part"
        )
