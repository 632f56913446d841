"""The style for attention modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ..._torch_compat.modules import parameters_of
from ...comm import Axis
from ...mesh.grid import Grid, describe_mesh
from ...mesh.layouts import Layout, as_layout, check_row_dim, row_layout
from ...ops.attention import Heads, check_groups
from ..base import GridStyle, LayoutLike, Runner
from ..module_kinds import HEADS, KEY_HEADS, describe_module, head_counts
from .blocks import ACROSS
from .config import read_from_config
from .runner import AttentionRunner

__all__ = ["Attention2D"]

_PACKS = "num_key_value_groups"
_GROUPS = (_PACKS, "n_rep")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim")


class Attention2D(GridStyle):
    """Run an attention module on this rank's heads and tokens, inside a model of DTensors.

    The module's projections have styles of their own (:func:`attention_projections` gives them);
    this one is for the module around them. A model that was not written for tensor parallelism
    needs no edit: between modules its code sees DTensors of the global shape, and inside this
    module local tensors of this row's tokens and this column's heads.

    * The floating point DTensors that the module is given (hidden states, states to attend to) are
      gathered along ``tp_col``, once for all the projections.
    * Plain tensors (masks, rotary tables, position ids) are taken to cover all tokens and heads, as
      they are made from global shapes, and are narrowed to this row's tokens and this column's
      heads (see ``whole_inputs``). The gradient of one that learns is whole too: the ranks' parts
      of it are summed, unless what made the tensor sums them by itself.
    * A ``BlockMask`` of ``flex_attention`` is narrowed likewise, and its function is called with
      global indices. A ``score_mod`` is not: it sees this row's batch and this column's heads, both
      numbered from 0.
    * Integer attributes that count heads are divided by the size of ``tp_col``.
    * While the module runs, ``scaled_dot_product_attention`` is computed across the grid. Key and
      value heads that do not divide over ``tp_col``, and query heads that do not, are replicated in
      the module, and each column computes its part of them. With ``row_dim=1`` ``tp_row`` splits
      the sequence, and causal masks account for a row's position in it.

    With ``row_dim=1``, anything that the module computes from lengths alone (positions numbered
    from 0, a mask of its own making) would cover one row's part only; it has to take such tensors
    as arguments instead.

    Keyword Args:
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        algorithm: with ``row_dim=1``, how queries meet the keys of other rows. ``"ring"``
            (``"auto"``): keys and values go around ``tp_row``, one block on the wire while another
            is computed. ``"gather"``: they are gathered first. ``"two_phase"``: the paper's, see
            :func:`attention2d`. ``"local"``: attention moves nothing, as the projections gather the
            keys and values (``attention_projections(whole_keys=True)``).
        balanced: with ``row_dim=1``, tokens are in the order of :func:`balanced_order`.
        num_heads, num_kv_heads: global numbers of heads. By default read from the module's
            attributes, or from its ``config``.
        local_attributes: the module's attributes to divide by the size of ``tp_col``. By default
            the usual names for numbers of heads and for the total width of the heads.
        whole_inputs: for plain tensors, by argument name, the meaning of their dims: each is
            ``"batch"``, ``"heads"``, ``"sequence"`` or None. By default
            ``("batch", "heads", "sequence", None)`` in 4 dims, ``("batch", "sequence", None)`` in
            3, ``("batch", "sequence")`` for integers and ``("sequence", None)`` for any other dtype
            in 2, and ``("sequence",)`` in 1. A dim of size 1 is left alone.
        own_parameters: for the module's own parameters (attention sinks ``[heads]``, a scale), by
            name, the meaning of their dims: ``("heads",)`` for one value per head, split over
            ``tp_col``; ``(None,)`` for values common to all heads, replicated on every rank.
        input_layouts: layout of local hidden states, ``Replicate()`` by default: a single
            Placement is the one on ``tp_col``.

    Raises:
        ValueError: when applied, if the heads cannot be split; in forward, for shapes that do not
            fit the tokens, for local hidden states that a style has handed out in another layout,
            for a plain tensor that learns where nothing tells who sums its gradient (a compiled
            graph), and if the module computes its attention without
            ``scaled_dot_product_attention`` where that would be wrong.

    Example::

        >>> q, kv, o = attention_projections(num_heads, num_kv_heads, mesh["tp_col"].size())
        >>> plan = {"model.layers.*.self_attn": Attention2D(),
        ...         "model.layers.*.self_attn.q_proj": q,
        ...         "model.layers.*.self_attn.[kv]_proj": kv,
        ...         "model.layers.*.self_attn.o_proj": o}
    """

    places_inside = False
    summed_inputs: frozenset[str] = frozenset()
    """Arguments that a style has made which sums their gradients itself."""

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
        own_parameters: Mapping[str, Sequence[str | None]] | None = None,
        input_layouts: LayoutLike = None,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        if algorithm not in ("auto", "local", *ACROSS):
            raise ValueError(
                f'algorithm is "auto", "local" or one of {list(ACROSS)}, not {algorithm!r}'
            )
        if row_dim == 0 and algorithm in ACROSS:
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
        for name, dims in (own_parameters or {}).items():
            if any(dim not in ("heads", None) for dim in dims) or list(dims).count("heads") > 1:
                raise ValueError(
                    f'own_parameters: of {name!r} a dim is "heads", at most one, or None, but got '
                    f"{dims!r}"
                )
        self.own_parameters = {name: tuple(dims) for name, dims in (own_parameters or {}).items()}
        self.input_layouts = as_layout(input_layouts, row_layout(row_dim), row=Shard(row_dim))
        self.given = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "local_attributes": self.local_attributes,
            "whole_inputs": self.whole_inputs or None,
            "own_parameters": self.own_parameters or None,
            "input_layouts": None if input_layouts is None else self.input_layouts,
        }

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for name, dims in self.own_parameters.items():
            split = Shard(dims.index("heads")) if "heads" in dims else Replicate()
            yield module, name, (Replicate(), split)

    def heads(self, module: nn.Module, axis: Axis) -> Heads | None:
        """A module's global head counts, read before they are divided; None if it does not say."""
        query, key = head_counts(module)
        query = query if self.num_heads is None else self.num_heads
        key = key if self.num_kv_heads is None else self.num_kv_heads
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
        names: tuple[str, ...] = HEADS + _WIDTHS
        if heads is not None and not heads.whole_key:
            names += KEY_HEADS
        elif heads is not None and heads.key == 1:
            names += _GROUPS
        values = {name: getattr(module, name, None) for name in names}
        divided = {
            name: value // columns
            for name, value in values.items()
            if type(value) is int and value % columns == 0
        }
        if heads is not None and heads.whole_key and heads.key > 1 and hasattr(module, _PACKS):
            # Each column has a part of a group, by which transformers reshapes a decoding query.
            divided[_PACKS] = 1
        return divided

    def config_values(self, module: nn.Module, axis: Axis) -> dict[str, int]:
        """This column's values of the head counts that the module's forward reads from a config."""
        heads = self.heads(module, axis)
        if heads is None or heads.whole_query:
            return {}
        whole_key = heads.whole_key
        return {
            name: heads.key // (1 if whole_key else axis.size)
            if name in KEY_HEADS
            else heads.query // axis.size
            for name in read_from_config(module)
        }

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        self.local_values(module, grid.col)
        heads = self.heads(module, grid.col)
        self.check_own_parameters(module, grid, heads)
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
        AttentionRunner(self, module, grid).check(module)

    def check_own_parameters(self, module: nn.Module, grid: Grid, heads: Heads | None) -> None:
        """Refuse own parameters of the module that ``own_parameters`` does not describe.

        Raises:
            ValueError: for a parameter that is not named, or has another number of dims, and for
                heads that do not divide over ``tp_col``.
        """
        found = parameters_of(module)
        own = {name: tuple(p.shape) for name, p in found.items() if p is not None}
        asked = {name: shape for name, shape in own.items() if name not in self.own_parameters}
        if asked:
            raise ValueError(
                f"{describe_module(module)}: what the dims of its own parameters {asked} are is to "
                f'be said: Attention2D(own_parameters={{name: ("heads",)}}) for what each head has '
                f"its own of, (None,) for what all share, () for a single number"
            )
        for name, dims in self.own_parameters.items():
            if len(own.get(name, ())) != len(dims):
                raise ValueError(
                    f"{describe_module(module)}: own_parameters says {name!r} has the dims {dims}, "
                    f"but its own parameters are {own}"
                )
            at = dims.index("heads") if "heads" in dims else None
            if at is not None and own[name][at] % grid.col.size:
                raise ValueError(
                    f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: the heads of "
                    f"{name} {own[name]} do not divide over {grid.col.name}: use a mesh whose "
                    f"{grid.col.name} divides them"
                )

    def check_positions(self, module: nn.Module, grid: Grid) -> None:
        """Refuse a module that would take this row's tokens for the full sequence.

        Raises:
            ValueError: for one that computes a bias from the lengths that it sees.
        """
        if self.row_dim == 1 and grid.row.size > 1 and hasattr(module, "compute_bias"):
            raise ValueError(
                f"{describe_module(module)} computes a bias from the lengths that it sees, which "
                f"are those of a part if {grid.row.name} splits the sequence: use row_dim=0"
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return AttentionRunner(self, module, grid)

    def __repr__(self) -> str:
        given = [f", {name}={value!r}" for name, value in self.given.items() if value is not None]
        return (
            f"{type(self).__name__}(row_dim={self.row_dim}, algorithm={self.algorithm!r}, "
            f"balanced={self.balanced}{''.join(given)})"
        )
