"""Attention on the grid: the style for attention modules, and the paper's algorithm by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from .comm import Axis, move
from .dropout import Masks, next_key
from .edges import gather_for_module, to_dtensor
from .grid import Grid, describe_mesh
from .layouts import Layout, as_layout, check_row_dim, normalize, row_layout
from .ops.attention import Heads, Order, Spec, check_groups, gathered, ring, two_phase
from .ops.attention.block import attend_to_all, spread
from .ops.dropout import drop, dropped
from .recognise import describe_module
from .styles import Colwise2D, GridStyle, LayoutLike, Rowwise2D, Runner

__all__ = ["Attention2D", "Projections", "attention2d", "attention_projections"]

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim")

_ACROSS = ("ring", "gather", "two_phase")
_SEQUENCE = 2
"""The dim of ``[batch, heads, sequence, features]``."""


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
    whole_keys: bool = False,
    output_layouts: LayoutLike = None,
    use_local_output: bool = False,
    algorithm: str = "auto",
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
        whole_keys: with ``row_dim=1``, gather keys and values along ``tp_row`` as they leave their
            projections, for modules that do not call ``scaled_dot_product_attention`` and put no
            positions into their keys. They go with ``Attention2D(algorithm="local")``.
        output_layouts: of the output projection, ``Shard(1)`` by default: the token layout.
        use_local_output: of the output projection.
        algorithm: of their matrix products.

    Returns:
        ``(q, kv, o)``.

    Raises:
        ValueError: if the query heads are no multiple of the key and value heads, or for
            ``whole_keys`` where rows hold whole sequences anyway.

    Example::

        >>> q, kv, o = attention_projections(32, 8, mesh["tp_col"].size())
        >>> plan = {"layers.*.self_attn": Attention2D(),
        ...         "layers.*.self_attn.q_proj": q,
        ...         "layers.*.self_attn.[kv]_proj": kv,
        ...         "layers.*.self_attn.o_proj": o}
    """
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_groups(num_heads, key_heads)
    if whole_keys and row_dim != 1:
        raise ValueError("whole_keys is for row_dim=1, where tp_row splits the sequence")
    heads = Heads(num_heads, key_heads, Axis("tp_col", (columns,), 0, "", False))

    def into_heads(whole: bool, over_row: bool) -> Colwise2D:
        outputs = Replicate() if over_row else Shard(row_dim), Replicate() if whole else Shard(-1)
        # What is whole is used by each rank for queries of its own: a share of the gradient.
        grads = tuple(Partial() if isinstance(p, Replicate) else p for p in outputs)
        return Colwise2D(
            row_dim=row_dim, output_layouts=outputs, grad_layouts=grads, algorithm=algorithm
        )

    return Projections(
        into_heads(heads.whole_query, False),
        into_heads(heads.whole_key, whole_keys),
        Rowwise2D(
            row_dim=row_dim,
            input_layouts=Replicate() if heads.whole_query else Shard(-1),
            output_layouts=Shard(1) if output_layouts is None else output_layouts,
            use_local_output=use_local_output,
            algorithm=algorithm,
        ),
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
      global shapes, and are cut to this row's tokens and this column's heads (``whole_inputs``).
    * Integer attributes that count heads are divided by the size of ``tp_col``.
    * While the module runs, ``scaled_dot_product_attention`` is computed across the grid. Key and
      value heads that do not divide over ``tp_col``, and query heads that do not, are whole in the
      module, and this column's share of them is computed. With ``row_dim=1`` the sequence is split
      over ``tp_row``, and causal masks know where in it a row is.

    With ``row_dim=1`` what the module computes from lengths alone (positions numbered from 0, a
    mask of its own making) would be that of a part: it has to take them as arguments.

    Keyword Args:
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        algorithm: with ``row_dim=1``, how queries meet the keys of other rows. ``"ring"``
            (``"auto"``): keys and values go around ``tp_row``, one block on the wire while another
            is computed. ``"gather"``: they are gathered first. ``"two_phase"``: the paper's, see
            :func:`attention2d`. ``"local"``: nothing travels, as their projections gather them
            (``attention_projections(whole_keys=True)``).
        balanced: with ``row_dim=1``, tokens are in the order of :func:`balanced_order`.
        num_heads, num_kv_heads: of the whole module. By default read from its attributes, or from
            its ``config``.
        local_attributes: the module's attributes to divide by the size of ``tp_col``. By default
            the usual names for numbers of heads and for their width all together.
        whole_inputs: for plain tensors by argument name, what their dims are: each ``"batch"``,
            ``"heads"``, ``"sequence"`` or None. By default ``("batch", "heads", "sequence", None)``
            in 4 dims, ``("batch", "sequence", None)`` in 3, ``("batch", "sequence")`` of integers
            and ``("sequence", None)`` of anything else in 2, ``("sequence",)`` in 1. A dim of size
            1 is left alone.
        input_layouts: layout of local hidden states, ``Replicate()`` by default: a single
            Placement is the one on ``tp_col``.

    Raises:
        ValueError: when applied, if the heads cannot be split; in forward, for shapes that do not
            fit the tokens, dropout inside attention, and if the module computes its attention
            where the style cannot reach it and that would be wrong.

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
        algorithm: str = "auto",
        balanced: bool = False,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        local_attributes: Iterable[str] | None = None,
        whole_inputs: Mapping[str, Sequence[str | None]] | None = None,
        input_layouts: LayoutLike = None,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        if algorithm not in ("auto", "local", *_ACROSS):
            raise ValueError(
                f'algorithm is "auto", "local" or one of {list(_ACROSS)}, not {algorithm!r}'
            )
        if row_dim == 0 and algorithm in _ACROSS:
            raise ValueError(
                f"algorithm {algorithm!r} is for row_dim=1: with row_dim=0 each row has whole "
                f"sequences, and attention is local to it; leave it out"
            )
        if balanced and (row_dim == 0 or algorithm == "local"):
            raise ValueError(
                "balanced is for attention across rows, row_dim=1 with an algorithm other than "
                '"local": leave it out'
            )
        if num_heads is not None:
            check_groups(num_heads, num_heads if num_kv_heads is None else num_kv_heads)
        for name, dims in (whole_inputs or {}).items():
            if any(dim not in ("batch", "heads", "sequence", None) for dim in dims):
                raise ValueError(
                    f'whole_inputs: a dim of {name!r} is "batch", "heads", "sequence" or None, '
                    f"but got {dims!r}"
                )
        self.row_dim = row_dim
        self.algorithm = algorithm
        self.balanced = balanced
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.local_attributes = None if local_attributes is None else tuple(local_attributes)
        self.whole_inputs = dict(whole_inputs or {})
        self.input_layouts = as_layout(input_layouts, row_layout(row_dim), row=Shard(row_dim))

    def heads(self, module: nn.Module, axis: Axis) -> Heads | None:
        """The heads of a module that is not divided yet; None if it does not say."""
        query = _count(module, _HEADS) if self.num_heads is None else self.num_heads
        key = _count(module, _KEY_HEADS) if self.num_kv_heads is None else self.num_kv_heads
        return None if query is None else Heads(query, query if key is None else key, axis)

    def local_values(self, module: nn.Module, axis: Axis) -> dict[str, int]:
        """The attributes that this style changes, with their new values.

        Raises:
            ValueError: for a given attribute that is no multiple of the axis' size.
        """
        columns = axis.size
        if self.local_attributes is not None:
            given = {name: getattr(module, name, None) for name in self.local_attributes}
            for name, value in given.items():
                if not isinstance(value, int) or value % columns:
                    raise ValueError(
                        f"{describe_module(module)}: {name} is {value!r}, which cannot be divided "
                        f"by {axis.name}={columns}: leave it out of local_attributes"
                    )
            return {name: value // columns for name, value in given.items() if value is not None}
        heads = self.heads(module, axis)
        if heads is not None and heads.whole_query:
            return {}
        names: tuple[str, ...] = _HEADS + _WIDTHS
        if heads is not None and not heads.whole_key:
            names += _KEY_HEADS
        elif heads is not None and heads.key == 1:
            names += _GROUPS
        values = {name: getattr(module, name, None) for name in names}
        return {
            name: value // columns
            for name, value in values.items()
            if type(value) is int and value % columns == 0
        }

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        self.local_values(module, grid.col)
        heads = self.heads(module, grid.col)
        if heads is not None:
            try:
                check_groups(heads.query, heads.key)
            except ValueError as error:
                raise ValueError(f"{describe_module(module)}: {error}") from None
        elif self.algorithm == "two_phase":
            raise ValueError(
                f"{describe_module(module)} does not say how many heads it has, which "
                f'algorithm="two_phase" has to know: give num_heads'
            )
        self.check_positions(module, grid)

    def check_positions(self, module: nn.Module, grid: Grid) -> None:
        """Refuse a module that would take this row's tokens for all there are.

        Raises:
            ValueError: for one that computes a bias from the lengths that it sees.
        """
        if self.row_dim == 1 and grid.row.size > 1 and hasattr(module, "compute_bias"):
            raise ValueError(
                f"{describe_module(module)} computes a bias from the lengths that it sees, which "
                f"are those of a part if {grid.row.name} splits the sequence: use row_dim=0"
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _AttentionRunner(self, module, grid)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(row_dim={self.row_dim}, algorithm={self.algorithm!r}, "
            f"balanced={self.balanced})"
        )


def _count(module: nn.Module, names: Iterable[str]) -> int | None:
    """The first of the attributes that the module, or its config, has as a number."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None


class _Intercept(TorchFunctionMode):
    """Has a :class:`_Call` compute ``scaled_dot_product_attention`` while it is entered."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            return self.call.drop(*args, **(kwargs or {}))
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.call(*args, **(kwargs or {}))


class _AttentionRunner(Runner):
    style = "Attention2D"

    def __init__(self, style: Attention2D, module: nn.Module, grid: Grid) -> None:
        self.grid = grid
        self.row_dim = style.row_dim
        self.declared = style.input_layouts
        self.algorithm = style.algorithm
        if style.algorithm == "auto":
            self.algorithm = "local" if style.row_dim == 0 else "ring"
        self.balanced = style.balanced
        self.whole_inputs = style.whole_inputs
        parameters = inspect.signature(module.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.heads = style.heads(module, grid.col)
        self.masks = Masks(grid, style.row_dim, None, (), owner=describe_module(module))
        self.local_values = style.local_values(module, grid.col)

    def installed(self, module: nn.Module) -> None:
        for name, value in self.local_values.items():
            setattr(module, name, value)

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens = _Tokens(self, module, _hidden_states(module, args, kwargs))
        names = (*self.names, *(f"argument {n}" for n in range(len(self.names), len(args))))
        args = tuple(tokens.enter(value, name) for value, name in zip(args, names, strict=False))
        kwargs = {name: tokens.enter(value, name) for name, value in kwargs.items()}
        self._check_keys(module)
        intercept = _Intercept(_Call(self, module, tokens))
        with intercept:
            result = forward(*args, **kwargs)
        why = "" if intercept.calls else self._cannot_do_without(module)
        if why:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)} did not call "
                f"scaled_dot_product_attention, but {why}"
            )
        return result

    def _check_keys(self, module: nn.Module) -> None:
        """That the keys of other rows come from somewhere."""
        if self.row_dim == 0 or self.grid.row.size == 1 or self.algorithm != "local":
            return
        runners = (child.__dict__.get("_tp2d") for child in module.modules())
        outputs = [getattr(runner, "wanted_out", (None,))[0] for runner in runners]
        if Replicate() not in outputs:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: with "
                f'algorithm="local" its projections have to gather keys and values along '
                f"{self.grid.row.name}, but none does: give them the styles of "
                f'attention_projections(whole_keys=True), or use algorithm="ring"'
            )

    def _cannot_do_without(self, module: nn.Module) -> str:
        """Why attention on what the projections give is wrong as it stands, if it is."""
        row, col, heads = self.grid.row, self.grid.col, self.heads
        mend = 'have it do so (Hugging Face: attn_implementation="sdpa")'
        if self.row_dim == 1 and row.size > 1 and self.algorithm != "local":
            return (
                f"its sequence is split over {row.name}, so it attended to a part of the keys: "
                f"{mend}, or gather the keys: attention_projections(whole_keys=True) with "
                f'algorithm="local"'
            )
        # With one key head the number of groups is divided, and a module needs no more.
        if heads is not None and col.size > 1 and heads.whole_key:
            if heads.whole_query or heads.key != 1:
                return (
                    f"its {heads.query} query and {heads.key} key heads do not divide over "
                    f"{col.name}, so each rank has to compute a share of them: {mend}, or use a "
                    f"mesh whose {col.name} divides them"
                )
        return ""


class _Call:
    """``scaled_dot_product_attention`` as an attention module on the grid calls it."""

    def __init__(self, runner: _AttentionRunner, module: nn.Module, tokens: _Tokens) -> None:
        self.runner, self.module, self.tokens = runner, module, tokens
        self.grid = runner.grid

    def refuse(self, why: str) -> ValueError:
        return ValueError(
            f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {why}"
        )

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
        runner, heads = self.runner, self.runner.heads
        if attn_mask is not None and is_causal:
            raise self.refuse("attention takes an explicit mask or is_causal, not both")
        in_rows = runner.row_dim == 1
        plain = not in_rows and (heads is None or not heads.whole_key or self.grid.col.size == 1)
        if plain and not dropout_p:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
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
            key, value = (spread(x, heads.index()) for x in (key, value))
            mask = None if mask is None else heads.own_query(mask)
            out = attend_to_all(query, key, value, mask, is_causal, scale, drop)
            out = _whole_heads(out, heads)
        return out if shape == query.shape else out.reshape(*shape[:-1], out.shape[-1])

    def _dropout(self, p: float, heads: Heads) -> Callable[[Tensor], Tensor]:
        """Dropout of the attention weights ``[batch, heads, queries, keys]`` of this rank."""
        key = next_key(self.grid)

        def dropout(weights: Tensor) -> Tensor:
            size, count, queries, keys = weights.shape
            row, device, first = self.grid.row, weights.device, 0
            at, seen = (torch.arange(length, device=device) for length in (queries, keys))
            if self.runner.row_dim == 0:
                first = sum(row.split(self.tokens.extent(0))[: row.index])
            elif row.size > 1:
                lengths = self.tokens.lengths
                order = self._order(row.split(lengths[0]))
                at = order.positions(row.index, device)
                if lengths[0] == lengths[1]:
                    seen = order.positions(None, device)
            batch = torch.arange(first, first + size, device=device)
            own = torch.arange(heads.first, heads.first + count, device=device)
            return drop(weights, dropped(key, p, [batch, own, at[:queries], seen]), p)

        return dropout

    def drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """What the module gets for ``torch.nn.functional.dropout``."""
        if not training or p == 0.0:
            return input
        if isinstance(input, DTensor) or input.ndim != 4:
            return self.runner.masks.drop(input, p)
        heads = self.runner.heads
        if heads is None:
            heads = Heads(input.shape[1] * self.grid.col.size, 1, self.grid.col)
        return self._dropout(p, heads)(input)

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
        """Undo what Hugging Face does to a query of one token with a mask.

        It takes it for a decoding step and makes ``[batch, key heads, queries of each, features]``
        of it. A row may well hold one token of many.
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

        With dropout of the weights, which are not written out otherwise, keys are gathered.
        """
        runner, row = self.runner, self.grid.row
        queries, keys = self.tokens.lengths
        whole = runner.algorithm == "local"
        sizes, key_sizes = row.split(queries), row.split(keys)
        here = sizes[row.index]
        for name, x, length, expected in (
            ("query", query, queries, max(1, here)),
            ("key", key, keys, keys if whole else max(1, key_sizes[row.index])),
            ("value", value, keys, keys if whole else max(1, key_sizes[row.index])),
        ):
            if x.shape[_SEQUENCE] != expected:
                raise self.refuse(
                    f"attention was called with a {name} of shape {tuple(x.shape)}, but this "
                    f"row's part of a sequence of {length} is {expected} long: caches of past "
                    f"keys, and modules that change the sequence, need row_dim=0"
                )
        if getattr(self.module, "is_causal", False) and mask is None and query.shape[2] == 1:
            # Hugging Face takes a query of one token for a decoding step, which sees all keys.
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
        # What stands in for a row without tokens, see Grid.with_stand_in.
        if not here:
            query = query.narrow(_SEQUENCE, 0, 0)
        if not key_sizes[row.index] and not whole:
            key, value = key.narrow(_SEQUENCE, 0, 0), value.narrow(_SEQUENCE, 0, 0)
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
            out = _two_phase(
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
        if not here:
            stand_in = out.new_zeros(*out.shape[:2], 1, out.shape[3])
            out = torch.cat([out, stand_in], _SEQUENCE)
        return out

    def _mask(self, mask: Tensor, sizes: Sequence[int], keys: int, heads: Heads) -> Tensor:
        """A mask of this row's queries and all keys."""
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


def _whole_heads(out: Tensor, heads: Heads) -> Tensor:
    """All heads of an output, where the module expects all."""
    if not heads.whole_query:
        return out
    return move(out, heads.axis, Shard(1), Replicate(), {1: heads.sizes})


def _two_phase(
    tensors: tuple[Tensor, Tensor, Tensor],
    shapes: Sequence[Sequence[int]],
    layouts: tuple[Placement, Placement],
    mask: Tensor | None,
    spec: Spec,
    grid: Grid,
    *,
    shares: bool,
) -> Tensor:
    """The paper's attention, of queries, keys and values whose sequence tp_row splits.

    Scores of row i's queries and column j's keys are computed, and used, on rank (i, j).

    Args:
        shapes: the global shapes.
        layouts: of queries and the output, and of keys and values, on tp_col.
        mask: of this row's queries and all keys.
        shares: where layouts replicate, gradients are handed back as shares, not whole.
    """
    (query, key, value), (query_shape, key_shape, value_shape) = tensors, shapes
    (on_query, on_key), row, col = layouts, grid.row, grid.col
    split, whole = Shard(_SEQUENCE), Replicate()
    query = grid.redistribute(
        query,
        (split, on_query),
        (split, whole),
        shape=query_shape,
        partial_grad=(False, not (shares and on_query == whole)),
    )
    sizes = col.split(key_shape[_SEQUENCE])
    start, count = sum(sizes[: col.index]), sizes[col.index]

    def of_this_column(x: Tensor, shape: Sequence[int]) -> Tensor:
        there = whole if shares and on_key == whole else split
        x = grid.redistribute(
            x, (split, on_key), (whole, there), shape=shape, partial_grad=(True, False)
        )
        return x.narrow(_SEQUENCE, start, count) if there == whole else x

    key, value = of_this_column(key, key_shape), of_this_column(value, value_shape)
    if mask is not None and mask.shape[-1] != 1:
        mask = mask.narrow(-1, start, count)
    hidden = None
    if spec.causal:
        here = spec.order.positions(row.index, query.device)
        there = spec.order.positions(None, query.device)[start : start + count]
        hidden = here[:, None] < there
    out = two_phase(query, key, value, mask, hidden, spec.scale, spec.heads, col)
    shape = (*query_shape[:3], value_shape[3])
    return grid.redistribute(out, (split, Partial()), (split, on_query), shape=shape)


def attention2d(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    algorithm: str = "two_phase",
    balanced: bool = False,
) -> DTensor:
    """The paper's two-phase attention on the grid, of DTensors in any layout.

    ``(QK^T)_ij = sum_t Q_it K_jt^T`` for the block (i, j) of the scores, the softmax across a
    whole row of them, its maximum and sum crossing the row, and ``O_ij = sum_t S_it V_tj``. The
    paper's blocks are ``(Shard(2), Shard(3))``: the sequence over ``tp_row``, the features of each
    head over ``tp_col``. Any sizes, heads and grids will do. The blocks of the scores stay where
    they are computed, since tokens are fewer than scores: the sums over t are made of queries
    gathered along ``tp_col``, of keys and values brought to the column of their scores, and of a
    reduce-scatter of the output.

    Each rank holds 1/N of the scores, ``heads x queries/R x keys/C`` numbers, until backward, and
    received forward, in units of one rank's part of the queries, ``2 (C-1)`` and, for keys and
    values, ``2 (R-1) + 2 R (C-1)/C``. The ring, with heads over ``tp_col``, holds no scores and
    receives ``2 (R-1)``: it is better wherever there are at least ``C`` heads. Two phases are for
    fewer heads than columns.

    Args:
        query, key, value: ``[batch, heads, sequence, features]`` on a mesh
            ``("tp_row", "tp_col")``. Keys and values may have fewer heads, shared by groups of
            query heads, and another sequence than the queries.
        attn_mask: whole on every rank, as ``scaled_dot_product_attention`` takes it. Its gradient
            is each rank's share.
        is_causal: no look at later tokens; not beside a mask.
        scale: of the scores, by default ``features ** -0.5``.
        algorithm: ``"two_phase"``, ``"ring"`` or ``"gather"``, see :class:`Attention2D`.
        balanced: the sequence is in the order of :func:`balanced_order`, its mask too.

    Returns:
        The output, placed as ``query``.

    Raises:
        TypeError: for anything but DTensors.
        ValueError: for shapes that do not fit, DTensors that are on different meshes or partial,
            an unknown algorithm, or a causal mask between sequences of different lengths.

    Source: TP2D (doi 10.11992/tis.202411023), section 2.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> q, k, v = (distribute_tensor(x, mesh, (Shard(2), Shard(3))) for x in (q, k, v))
        >>> attention2d(q, k, v, is_causal=True).placements
        (Shard(dim=2), Shard(dim=3))
    """
    tensors = query, key, value
    if not all(isinstance(x, DTensor) for x in tensors):
        raise TypeError(
            f"attention2d takes DTensors, not {[type(x).__name__ for x in tensors]}: "
            f"distribute_tensor or DTensor.from_local makes them"
        )
    if algorithm not in _ACROSS:
        raise ValueError(f"algorithm is one of {list(_ACROSS)}, not {algorithm!r}")
    shapes = [tuple(x.shape) for x in tensors]
    described = f"query, key and value of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
    fits = all(len(shape) == 4 for shape in shapes) and (
        shapes[0][0] == shapes[1][0]
        and shapes[1][:3] == shapes[2][:3]
        and shapes[0][3] == shapes[1][3]
    )
    if not fits:
        raise ValueError(
            f"{described} are not [batch, heads, sequence, features] that fit each other"
        )
    (size, count, queries, features), keys = shapes[0], shapes[1][2]
    grid = Grid(query.device_mesh)
    if any(x.device_mesh != grid.mesh for x in tensors):
        raise ValueError("query, key and value are on different meshes: put them on one")
    if any(p.is_partial() for x in tensors for p in x.placements):
        raise ValueError(f"{described} are placed with partial sums: redistribute them first")
    check_groups(count, shapes[1][1])
    if is_causal and (attn_mask is not None or queries != keys):
        raise ValueError(
            f"is_causal is for a sequence that attends to itself, without a mask, but the "
            f"sequences are {queries} and {keys} long: pass one mask that says it all"
        )
    heads = Heads(count, shapes[1][1], grid.col)
    sizes = grid.row.split(queries)
    mask = None
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        whole_mask = size, count, queries, keys
        if any(a not in (1, b) for a, b in zip(mask.shape, whole_mask, strict=True)):
            raise ValueError(
                f"a mask of shape {tuple(attn_mask.shape)} does not broadcast to {whole_mask}: "
                f"every rank passes the whole of it"
            )
        if mask.shape[2] != 1:
            mask = mask.narrow(2, sum(sizes[: grid.row.index]), sizes[grid.row.index])
    spec = Spec(
        axis=grid.row,
        order=Order.balanced(sizes) if balanced else Order.contiguous(sizes),
        keys=None if queries == keys else grid.row.split(keys),
        causal=is_causal,
        scale=features**-0.5 if scale is None else scale,
        heads=heads.index(of_all=algorithm == "two_phase"),
    )
    split, whole = Shard(_SEQUENCE), Replicate()
    given = [normalize(grid.layout(x, 0), 4) for x in tensors]

    def brought(n: int, on_col: Placement) -> Tensor:
        layout: Layout = split, on_col
        x = tensors[n].to_local()
        sums = algorithm != "two_phase" and on_col == whole
        return grid.redistribute(x, given[n], layout, shape=shapes[n], partial_grad=(False, sums))

    if algorithm == "two_phase":
        # As they are on tp_col, if that leaves the sequence to tp_row.
        on_query, on_key = (
            whole if layout[1] in (split, Shard(0)) else layout[1] for layout in given[:2]
        )
        local = brought(0, on_query), brought(1, on_key), brought(2, on_key)
        out = _two_phase(local, shapes, (on_query, on_key), mask, spec, grid, shares=False)
    else:
        on_query, on_key = Shard(1), whole if heads.whole_key else Shard(1)
        q, k, v = brought(0, on_query), brought(1, on_key), brought(2, on_key)
        k, v = heads.own_key(k), heads.own_key(v)
        mask = None if mask is None else heads.own_query(mask)
        out = (ring if algorithm == "ring" else gathered)(q, k, v, mask, spec)
    shape = (*shapes[0][:3], shapes[2][3])
    out = grid.redistribute(out, (split, on_query), given[0], shape=shape)
    return to_dtensor(out, given[0], grid, shape)


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

    def __init__(self, runner: _AttentionRunner, module: nn.Module, hidden: Tensor) -> None:
        self.runner, self.module, self.hidden = runner, module, hidden
        self.grid, self.row_dim = runner.grid, runner.row_dim
        self.shape: tuple[int, int] | None = None
        self.keys: int | None = None
        if isinstance(hidden, DTensor) and hidden.device_mesh == self.grid.mesh:
            self.shape = hidden.shape[0], hidden.shape[1]
            # A model may have several streams of tokens: this is the one under way now.
            self.grid.tokens.shape = self.shape

    def extent(self, dim: int) -> int:
        """Batch (0) or sequence (1) of all tokens."""
        if self.shape is not None:
            return self.shape[dim]
        if isinstance(self.hidden, DTensor):
            layout, local = self.grid.layout(self.hidden, self.row_dim), self.hidden.to_local()
        else:
            layout, local = self.declared, self.hidden
        return self.grid.extent(self.grid.without_stand_in(local, layout), dim, layout)

    @property
    def declared(self) -> Layout:
        return self.runner.declared

    @property
    def lengths(self) -> tuple[int, int]:
        """Of the sequence of queries, and of that of keys."""
        queries = self.extent(1)
        return queries, queries if self.keys is None else self.keys

    def enter(self, value: Any, name: str) -> Any:
        """An argument as the module is to see it."""
        if isinstance(value, tuple | list):
            return type(value)(self.enter(item, name) for item in value)
        if not isinstance(value, Tensor):
            return value
        if value is self.hidden:
            return self._gather(value)
        if not (isinstance(value, DTensor) and value.is_floating_point() and value.ndim == 3):
            return self._cut(value, name)
        if value.shape[0] != self.hidden.shape[0] or name in self.runner.whole_inputs:
            return self._cut(value, name)
        # States to attend to.
        self.keys = value.shape[1]
        row = self.grid.row
        if self.row_dim == 1 and not all(row.split(self.keys)):
            raise ValueError(
                f"{describe_module(self.module)}: {name} of shape {tuple(value.shape)} leaves "
                f"some of {row.name}={row.size} without keys: use row_dim=0 or fewer rows"
            )
        return self._gather(value)

    def _gather(self, x: Tensor) -> Tensor:
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

    def _cut(self, x: Tensor, name: str) -> Tensor:
        """This row's and column's part of a tensor that is whole."""
        dims = self.runner.whole_inputs.get(name)
        if dims is None:
            dims = _dims_of(x)
        elif len(dims) != x.ndim:
            raise ValueError(
                f"{describe_module(self.module)}: {name} has shape {tuple(x.shape)}, but "
                f"whole_inputs says that its dims are {dims}"
            )
        on_row = self._part(x, name, dims, "sequence" if self.row_dim else "batch")
        on_col = self._part(x, name, dims, "heads")
        if isinstance(x, DTensor):
            x = x.redistribute(placements=self.grid.placements((on_row, on_col)))
            # Other rows have other tokens, other columns other heads: what is whole gets shares.
            grads = [Partial() if p == Replicate() else p for p in (on_row, on_col)]
            return x.to_local(grad_placements=grads if x.is_floating_point() else None)
        for axis, placement in ((self.grid.row, on_row), (self.grid.col, on_col)):
            if isinstance(placement, Shard):
                sizes = axis.split(x.shape[placement.dim])
                start, count = sum(sizes[: axis.index]), sizes[axis.index]
                if not count:
                    # For the token that stands in for none.
                    start, count = 0, 1
                x = x.narrow(placement.dim, start, count)
        return x

    def _part(
        self, x: Tensor, name: str, dims: Sequence[str | None], what: str
    ) -> Shard | Replicate:
        """How an axis is to cut ``x``: in the dim that is ``what``."""
        heads = self.runner.heads
        axis = self.grid.col if what == "heads" else self.grid.row
        if what not in dims or axis.size == 1:
            return Replicate()
        dim = dims.index(what)
        if x.shape[dim] == 1:
            return Replicate()
        if what == "heads":
            two_phase = self.runner.row_dim == 1 and self.runner.algorithm == "two_phase"
            cuts = heads is not None and not heads.whole_query and not two_phase
            whole = heads.query if heads is not None and cuts else None
            return Shard(dim) if x.shape[dim] == whole else Replicate()
        whole = self.extent(self.row_dim)
        if x.shape[dim] == whole:
            return Shard(dim)
        if not isinstance(x, DTensor) and x.shape[dim] == max(1, axis.split(whole)[axis.index]):
            return Replicate()
        raise ValueError(
            f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {name} has "
            f"shape {tuple(x.shape)}, but its dim {dim} was taken for the {what}, which is {whole} "
            f"long: pass it whole, or say what its dims are: "
            f"Attention2D(whole_inputs={{{name!r}: (...)}})"
        )


def _dims_of(x: Tensor) -> tuple[str | None, ...]:
    if x.ndim == 2 and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
        return "sequence", None
    known: dict[int, tuple[str | None, ...]] = {
        1: ("sequence",),
        2: ("batch", "sequence"),
        3: ("batch", "sequence", None),
        4: ("batch", "heads", "sequence", None),
    }
    return known.get(x.ndim, (None,) * x.ndim)
