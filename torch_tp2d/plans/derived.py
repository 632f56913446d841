"""A plan for a model without a built-in one, from what one forward shows of its structure.

Colwise and rowwise Linears are recognized by where outputs go. If the outputs of a group of Linears
reach only one other Linear, through attention or through elementwise functions, then the group
opens a block, split by heads or features, and that Linear closes it. A module that is in no group
and is no embedding, norm or head stays replicated.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..mesh.grid import check_mesh
from ..mesh.layouts import Layout
from ..parallelize.resolve import features_of
from ..styles.local import Local2D
from ..styles.module_kinds import describe_module, embeds, is_conv1d, is_linear
from ..styles.replicated import Replicate
from .adapters import without_adapters
from .attention_facts import AttentionFacts
from .losses import LossFunction, causal_lm_loss
from .methods import AsTransformers
from .parts import Parts
from .patterns import DerivedPlan, by_patterns
from .structure import Attention, Structure, own_parameters, structure_of

__all__ = ["DerivedPlan", "derived_plan"]

_ONE_BY_ONE = frozenset(
    {
        *("abs", "add", "celu", "clamp", "contiguous", "cos", "cosh", "div", "dropout", "elu"),
        *("eq", "erf", "exp", "expm1", "float", "ge", "gelu", "gt", "hardshrink", "hardswish"),
        *("hardtanh", "le", "leaky_relu", "log", "log1p", "logsigmoid", "lt", "maximum"),
        *("minimum", "mish", "mul", "ne", "neg", "pow", "prelu", "reciprocal", "relu", "relu6"),
        *("rmul", "rpow", "rsqrt", "rsub", "rtruediv", "selu", "sigmoid", "sign", "silu", "sin"),
        *("sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "tan", "tanh"),
        *("tanhshrink", "threshold", "to", "truediv", "type", "type_as", "where"),
    }
)
"""Elementwise functions, which a tensor may go through with its features split."""
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
_PRODUCTS = frozenset(("baddbmm", "bmm", "einsum", "matmul", "softmax"))
_IN_PARTS = frozenset(("chunk", "split", "tensor_split"))


def derived_plan(
    model: nn.Module, mesh: DeviceMesh, *, inputs: Any = None, **options: Any
) -> DerivedPlan:
    """A plan from the model's own structure, seen in one forward of a copy without values.

    Args:
        model: any model, not parallelized yet; it is not changed.
        mesh: named ``("tp_row", "tp_col")``.
        inputs: a dict of keyword arguments or a tuple of arguments of the model's forward, needed
            if its signature does not tell them: several sequences, with the batch in dim 0.
        options: see :class:`Parts`. ``loss_parallel`` is off by default for a model whose own loss
            this library does not know: its logits are then gathered on every rank.

    Returns:
        A dict of module names and styles, which prints as the reasons for them.

    Raises:
        ValueError: for a model that cannot run without values, that has a parameter which no style
            can name, or whose structure is unclear; the message says where.

    Warns:
        UserWarning: names the modules whose matrices stay replicated on every rank.

    Example::

        >>> plan = derived_plan(model, mesh["tp_row", "tp_col"])
        >>> print(plan)
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    """
    check_mesh(mesh)
    with without_adapters(model):
        plan = _Derivation(model, mesh, structure_of(model, inputs), options).plan()
    whole = [key for key, why in plan.reasons.items() if why.startswith("whole")]
    if whole:
        warnings.warn(
            f"of {type(model).__name__} these stay whole on every rank, as they open or close no "
            f"group of Linears: {whole}. Name them otherwise in the plan if they are large",
            stacklevel=2,
        )
    return plan


class _Derivation:
    """Gives each module of a structure a style, then merges equal layers into patterns."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, seen: Structure, options: dict[str, Any]
    ) -> None:
        self.model, self.mesh, self.seen = model, mesh, seen
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.users = seen.users()
        self.batch, self.seq = seen.tokens
        causal = seen.loss == "ForCausalLMLoss"
        defaults: dict[str, Any] = {"loss_parallel": causal}
        if any(shape[:1] == (self.batch * self.seq,) for shape in seen.shapes.values()):
            # The model flattens all tokens into one dim, of which no shard is a part of a sequence.
            defaults["sequence_parallel"] = False
        self.parts = Parts(**{**defaults, **options})
        self.own_loss = causal and self.parts.loss_parallel
        self.styles: dict[str, ParallelStyle] = {}
        self.reasons: dict[str, str] = {}
        self.split: set[str] = set()
        """The modules that open a group, whose output features or heads are split."""

    def plan(self) -> DerivedPlan:
        for name in self.seen.given:
            if self._is_projection(name) and self._of_tokens(name):
                self._close(name)
        for name in self.seen.given:
            if name not in self.styles and not any(self._is_within(name, o) for o in self.styles):
                self._single(name)
        self._check_all_named()
        plan = by_patterns(self.modules, self.styles, self.reasons)
        own = own_parameters(self.model)
        what = f"the model itself has the parameters {own}"
        if own and (self.own_loss or not self._meet_what_is_whole()):
            raise self._unclear("", what)
        if own:
            plan[""] = Local2D(input_layouts=(Whole(), Whole()))
            plan.reasons[""] = f"{what}, which meet what is whole"
        elif self.own_loss:
            plan[""] = LossFunction(causal_lm_loss)
            plan.reasons[""] = "the loss, of logits that stay split over the vocabulary"
        elif hasattr(self.model, "get_input_embeddings"):
            plan[""] = AsTransformers()
            plan.reasons[""] = "inputs_embeds and generate, as transformers has them"
        return plan

    # Groups

    def _close(self, name: str) -> None:
        """If a Linear closes a group, give the group and the Linear their styles."""
        group = list(self.seen.given[name])
        closes = all(
            self._is_projection(source)
            and self._of_tokens(source)
            and source not in self.styles
            and source not in self.seen.returned
            # What is the same for every sample, as positions are, has no batch for tp_row to split.
            and self.seen.shapes[source][0] == self.seen.shapes[name][0]
            and {user for user in self.users[source] if not self._is_vectors(user)} == {name}
            for source in group
        )
        if not group or not closes:
            return
        calls = [call for call in self.seen.attentions if {*call.given()} & {*group}]
        if calls:
            self._attention(calls[0], group, name)
        else:
            self._feed_forward(group, name)

    def _feed_forward(self, group: Sequence[str], close: str) -> None:
        through, width = self.seen.given[close], self._widths(close)[0]
        for source in group:
            parts, cut = self._widths(source)[1] / width, through[source] & _IN_PARTS
            if through[source] & _PRODUCTS:
                raise self._unclear(close, f"its attention to {_listed(group)} is not understood")
            met = through[source] | self.seen.functions[source]
            if met - _ONE_BY_ONE - cut or parts not in ((1, 2, 3) if cut else (1,)):
                return
        between = [name for source in group for name in self.users[source] if name != close]
        learned = {name: self._on_features(name, width) for name in between}
        if None in learned.values():
            return
        for source in group:
            parts = self._widths(source)[1] // width
            style = self.parts.colwise(**({"parts": parts} if parts > 1 else {}))
            self._name(source, style, f"opens what {close} closes", split=True)
        for name, activation in learned.items():
            if activation is not None:
                self._name(name, activation, "on features that are split")
        self._name(close, self.parts.rowwise(), f"closes {_listed(group)}")

    def _on_features(self, name: str, width: int) -> ParallelStyle | None:
        """The style of an activation that learns a number for all features, or one for each.

        None for any other parameter. A module that has buffers alone takes DTensors.
        """
        learned = dict(self.modules[name].named_parameters(recurse=False))
        if not learned:
            return Replicate(input_layouts=Shard(-1), row_dim=self.parts.row_dim)
        if any(param.shape not in ((), (1,), (width,)) for param in learned.values()):
            return None
        each = {key: Shard(0) for key, param in learned.items() if param.shape == (width,)}
        return Local2D(params=each, input_layouts=(Shard(self.parts.row_dim), Shard(-1)))

    def _attention(self, call: Attention, group: Sequence[str], close: str) -> None:
        width = self._widths(close)[0]
        size, outs = width // call.heads, {source: self._widths(source)[1] for source in group}
        where = _common([call.module, *group])
        if width % call.heads or not where:
            raise self._unclear(close, f"{width} features of {call.heads} heads, of {group}")
        facts = AttentionFacts(self.seen, self.modules[where], where, call.heads, size)
        try:
            given = facts.options({*group, close})
        except ValueError as error:
            raise self._unclear(where, str(error)) from None
        if len(group) == 1:
            style, opens = self._of_fused(group[0], call.heads, width, given)
        else:
            queries = [s for s in group if s in call.sources[0] and outs[s] == width][:1]
            others = {outs[s] for s in group if s not in queries}
            alike = len(group) == 3 and len(queries) == len(others) == 1
            if not alike or min(others) % size or not all(self._by_heads(s, size) for s in group):
                raise self._unclear(
                    close, f"of queries, keys and values of {call.heads} heads, {outs} were found"
                )
            style, q, kv, o = self.parts.attention(
                self.mesh, call.heads, min(others) // size, **given
            )
            opens = {**{s: q if s in queries else kv for s in group}, close: o}
        self._name(where, style, f"attention of {call.heads} heads")
        for name, opened in opens.items():
            why = f"closes the heads of {where}" if name == close else f"heads of {where}"
            self._name(name, opened, why, split=name != close)
        if close not in self.styles:
            self._name(close, self.parts.rowwise(), f"closes the heads of {where}")

    def _by_heads(self, name: str, size: int) -> bool:
        """Whether a projection is viewed as heads of ``size`` features, or its view is unknown."""
        cut = self.seen.cut.get(name)
        return cut is None or cut == (self._widths(name)[1] // size, size)

    def _of_fused(
        self, name: str, heads: int, width: int, given: dict[str, Any]
    ) -> tuple[ParallelStyle, dict[str, ParallelStyle]]:
        """The styles of an attention and of its fused projection to queries, keys and values."""
        cut, columns = self.seen.cut.get(name, ()), self.mesh["tp_col"].size()
        size = width // heads
        if len(cut) == 3 and cut[0] == width > cut[1] == cut[2] and cut[1] % (size * columns) == 0:
            # There are fewer key and value heads than query heads.
            style, _, _, _ = self.parts.attention(self.mesh, heads, cut[1] // size, **given)
            return style, {name: self.parts.colwise(parts=cut)}
        one_by_one = cut in ((width,) * 3, (3, width), (3, heads, size))
        by_heads = cut in ((heads, 3 * size), (heads, 3, size)) and heads % columns == 0
        if self._widths(name)[1] == 3 * width and one_by_one != by_heads:
            style, q, _, _ = self.parts.attention(self.mesh, heads, fused=3, **given)
            # Where the three lie head by head, a column's shard has complete heads of each.
            return style, {name: q if one_by_one else self.parts.colwise(parts=1)}
        raise self._unclear(
            name,
            f"its features, cut into {cut}, are neither queries, keys and values one after the "
            f"other nor whole heads for each of {columns} columns",
        )

    # Single modules

    def _single(self, name: str) -> None:
        shape, sources = self.seen.shapes.get(name), self.seen.given[name]
        if shape is None:
            raise self._unclear(name, "it is given no tensor")
        whole, vectors = dict[str, Any](), self._is_vectors(name)
        if sources and {*sources} <= self.split:
            if not vectors:
                raise self._unclear(name, f"it takes what {_listed(sources)} opens")
            # The style of the attention or activation around it lays out its vectors.
        elif any(name in call.given() for call in self.seen.attentions):
            raise self._unclear(name, "what it gives goes into an attention that is not understood")
        elif embeds(self.modules[name]):
            self._embedding(name, shape)
        elif vectors and len(shape) == 3 and name in self.seen.picked:
            # The tokens are picked by ids, which are global on every rank.
            whole = {"output_layouts": (Whole(), Whole()), "use_local_output": True}
            style = Replicate(row_dim=self.parts.row_dim, **whole)
            self._name(name, style, "a norm, of whose tokens some are picked")
        elif vectors and len(shape) == 3:
            self._name(name, self.parts.norm(), "a norm of the residual stream")
        elif self._is_head(name):
            self._name(name, self.parts.head(), "the head, by its vocabulary")
        else:
            if any(self._is_within(other, name) for other in self.styles):
                raise self._unclear(name, "it has parameters of its own around what is split")
            if name in self.seen.output and self._is_projection(name):
                whole = {"output_layouts": (Whole(), Whole()), "use_local_output": True}
                if sources and {*sources} <= self.seen.picked:
                    whole["input_layouts"] = Whole(), Whole()
            elif not sources:
                # It takes the model's own inputs, which are replicated on every rank, as ids are.
                stream: Layout = Shard(self.parts.row_dim), self.parts.residual
                if isinstance(self.modules[name], _CONVOLUTIONS):
                    # The output's dim 1 is channels, not a sequence, so it stays replicated.
                    stream = Whole(), Whole()
                whole = {"input_layouts": (Whole(), Whole()), "output_layouts": stream}
                whole["use_local_output"] = False
            style = Replicate(row_dim=self.parts.row_dim, **whole)
            self._name(name, style, "whole on every rank: of no group")

    def _embedding(self, name: str, shape: tuple[int, ...]) -> None:
        # Only the batch is compared: encoder and decoder have sequences of different lengths.
        if len(shape) == 2 and shape[0] == self.batch:
            self._name(name, self.parts.embedding(), "an embedding of tokens")
        elif len(shape) == 2 and shape[0] == 1:
            self._name(name, self.parts.positions(), "an embedding of positions")
        elif len(shape) == 1 and shape[0] != self.batch:
            on_row = Shard(0) if self.parts.row_dim == 1 else Whole()
            on_col = Shard(0) if self.parts.sequence_parallel else Whole()
            style = self.parts.embedding(output_layouts=(on_row, on_col))
            self._name(name, style, "an embedding of positions")
        else:
            raise self._unclear(name, f"its ids have the shape {shape}")

    def _is_head(self, name: str) -> bool:
        rows = {m.num_embeddings for m in self.modules.values() if isinstance(m, nn.Embedding)}
        return (
            is_linear(self.modules[name])
            and name in self.seen.output
            and len(self.seen.shapes[name]) == 3
            and self._widths(name)[1] in rows
        )

    def _is_projection(self, name: str) -> bool:
        return is_linear(self.modules[name]) or is_conv1d(self.modules[name])

    def _is_vectors(self, name: str) -> bool:
        return all(param.ndim <= 1 for param in self.modules[name].parameters())

    def _widths(self, name: str) -> tuple[int, int]:
        return features_of(self.modules[name])

    def _of_tokens(self, name: str) -> bool:
        """Whether a module maps all tokens one by one, mixing none and picking none of them."""
        shape = self.seen.shapes[name]
        mixes = len(shape) == 3 and (shape[1] == 1 or shape[1] != self.seq == shape[2])
        return (len(shape) == 3 or shape[:1] == (self.batch * self.seq,)) and not mixes

    @staticmethod
    def _is_within(name: str, other: str) -> bool:
        return name.startswith(f"{other}.")

    # All together

    def _name(self, name: str, style: ParallelStyle, why: str, *, split: bool = False) -> None:
        if self.seen.shapes.get(name) == ():
            raise self._unclear(name, "it is given a scalar before its tokens: pass these first")
        self.styles[name], self.reasons[name] = style, why
        if split:
            self.split.add(name)

    def _check_all_named(self) -> None:
        """Refuse a parameter of a module that was not called, is in no entry and tied to none."""
        for name, module in self.modules.items():
            own = own_parameters(module)
            if own and name not in self.seen.given:
                twin = self._twin(module)
                if twin is not None:
                    self._name(name, self.styles[twin], f"tied to {twin}")
                elif not any(self._is_within(name, other) for other in self.styles):
                    raise self._unclear(name, f"it has the parameters {own}, and was not called")

    def _meet_what_is_whole(self) -> bool:
        """Whether the model's own parameters meet only replicated outputs of last projections."""
        before = any("" in sources for name, sources in self.seen.given.items() if name)
        ends = [name for name in self.seen.output if name]
        projections = all(
            name in self.styles and self._is_projection(name) and name not in self.split
            for name in ends
        )
        return bool(ends) and projections and not before

    def _twin(self, module: nn.Module) -> str | None:
        """The name of a module in the plan that has the same parameters as this one."""
        mine = {name: id(param) for name, param in module.named_parameters(recurse=False)}
        for name in self.styles:
            theirs = self.modules[name].named_parameters(recurse=False)
            if mine == {n: id(param) for n, param in theirs}:
                return name
        return None

    def _unclear(self, name: str, why: str) -> ValueError:
        return ValueError(
            f"the structure of {type(self.model).__name__} does not tell a plan. "
            f"{name or 'The root'}, {describe_module(self.modules[name])}: {why}. Write the plan "
            f"by hand, as a dict of module names and styles"
        )


def _common(names: Sequence[str]) -> str:
    """The innermost module around all of the named ones."""
    return ".".join(os.path.commonprefix([name.split(".") for name in names]))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
