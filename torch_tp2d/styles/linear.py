"""The matmul styles: which layouts a module takes and gives, and which op computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from ..comm import reshard_fused_grad
from ..mesh import layouts
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import STATIONARY, TP_COL, Layout, MatmulRule, as_layout
from ..ops import matmul
from ..ops.matmul import ALGORITHMS, Call, Cut, LinearOp, Shards, linear2d
from ..ops.matmul.call import low_precision
from ..ops.matmul.pipelined import takes_deferred_grad
from ..planner.choice import LinearCase, choose_algorithm, choose_dataflow
from ..planner.rates import Rates, known
from ..runtime.context import Sizes, VersionGuard
from ..runtime.prefetch import Prepared, prepare_parameters
from .base import (
    FEATURES,
    GridStyle,
    LayoutLike,
    Resolved,
    Runner,
    check_dims,
    local_shards,
    values_of,
)
from .boundary import Entry, Exit
from .embedding import EmbeddingRunner, PatchRunner
from .module_kinds import describe_module, is_conv1d, is_embedding, is_linear, is_patch_embedding
from .norm import Norm2D

__all__ = [
    "Block2DParallel",
    "Colwise2D",
    "EmbeddingRunner",
    "GridStyle",
    "Norm2D",
    "Rowwise2D",
    "Runner",
]


class _MatmulStyle(GridStyle):
    """What Colwise2D, Rowwise2D and Block2DParallel share."""

    rule: MatmulRule
    embeddings = True
    patches = False
    """Whether it takes the Conv2d of a patch embedding."""

    def __init__(
        self,
        *,
        input_layouts: LayoutLike = None,
        output_layouts: LayoutLike = None,
        use_local_output: bool = True,
        row_dim: int = 0,
        dataflow: str = "auto",
        algorithm: str = "auto",
        reshard_after_forward: bool | None = None,
        regather_input: bool = False,
        grad_layouts: LayoutLike = None,
        parts: int | None = None,
    ) -> None:
        super().__init__()
        layouts.check_row_dim(row_dim)
        if dataflow not in ("auto", self.rule.dataflow, STATIONARY):
            raise ValueError(
                f'{type(self).__name__} has dataflow "{self.rule.dataflow}" (or "auto") or '
                f'"{STATIONARY}", not {dataflow!r}'
            )
        if algorithm != "auto" and algorithm not in ALGORITHMS:
            raise ValueError(f'algorithm is "auto" or one of {list(ALGORITHMS)}, not {algorithm!r}')
        self.row_dim = row_dim
        self.dataflow = dataflow
        self.algorithm = algorithm
        self.use_local_output = use_local_output
        whole_input = isinstance(self.rule.input_col, Replicate)
        if regather_input and not (whole_input and algorithm in ("auto", "pipelined")):
            raise ValueError(
                f"{type(self).__name__} with algorithm {algorithm!r} keeps no gathered tokens for "
                f'backward: regather_input is for Colwise2D with "pipelined", leave it out'
            )
        self.says_parts = parts is not None
        parts = 1 if parts is None else parts
        if parts < 1 or (parts > 1 and not (self.rule is layouts.COLWISE and use_local_output)):
            raise ValueError(
                f"parts is the number of projections that a fused weight holds side by side, at "
                f"least 1, for Colwise2D with use_local_output=True, not {parts} for "
                f"{type(self).__name__}"
            )
        self.parts = parts
        self.reshard_after_forward = reshard_after_forward
        self.regather_input = regather_input
        self.given_layouts = input_layouts, output_layouts, grad_layouts
        row = Shard(row_dim)
        self.input_layouts = as_layout(input_layouts, (row, self.rule.input_col), row=row)
        self.output_layouts = as_layout(output_layouts, (row, self.rule.output_col), row=row)
        self.grad_layouts = (
            None if grad_layouts is None else as_layout(grad_layouts, (row, row), row=row)
        )
        for layout in (self.input_layouts, self.output_layouts):
            if any(not isinstance(p, Shard | Replicate) for p in layout):
                raise ValueError(
                    f"{type(self).__name__}: layouts are made of Shard and Replicate, not {layout}"
                )
        if parts > 1 and self.output_layouts != (row, Shard(-1)):
            raise ValueError(
                f"parts={parts} is for an output whose features are split, {(row, Shard(-1))}, "
                f"not {self.output_layouts}: a whole output has the projections side by side anyway"
            )

    shards_over_row = True
    """Whether tp_row holds 1/R of the weight; lifted stock styles replicate it there."""

    def _weight_layout(self, module: Any) -> Layout:
        on_row, on_col = self.rule.weight_dims
        if is_patch_embedding(module):
            # [out, channels, height, width]: of what a patch is made of, the dim that cuts finest.
            sizes: Any = module.weight.shape
            on_row = max((1, 2, 3), key=lambda dim: sizes[dim])
        if is_embedding(module):
            # The tied head is this weight transposed in role: [vocab, hidden] = [out, in].
            on_row, on_col = on_col, on_row
        if is_conv1d(module):
            on_row, on_col = 1 - on_row, 1 - on_col
        return (Shard(on_row) if self.shards_over_row else Replicate()), Shard(on_col)

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", self._weight_layout(module)
        if getattr(module, "bias", None) is not None:
            yield module, "bias", (Replicate(), Shard(0))

    def check(self, module: Any, grid: Grid) -> None:
        super().check(module, grid)
        style = type(self).__name__
        if is_embedding(module):
            if not self.embeddings:
                raise TypeError(
                    f"{style} is for nn.Linear and Conv1D, not {describe_module(module)}: use "
                    f"Rowwise2D or Colwise2D"
                )
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(module, option):
                    raise ValueError(
                        f"{describe_module(module)}: {option} is not supported on a sharded "
                        f"embedding: make it without"
                    )
            if self.algorithm not in ("auto", "collective"):
                raise ValueError(
                    f"{describe_module(module)}: an embedding multiplies nothing, so algorithm "
                    f"{self.algorithm!r} means nothing for it: leave it out"
                )
        elif self.patches and is_patch_embedding(module):
            self._check_patches(module)
        elif self.patches and isinstance(module, nn.Conv2d):
            raise TypeError(
                f"{style} takes a Conv2d whose patches do not overlap (stride equal to the kernel, "
                f"no padding, dilation or groups), not {describe_module(module)}: use "
                f"torch_tp2d.Replicate() for it"
            )
        elif isinstance(module, nn.Embedding):
            raise TypeError(
                f"{style} is for an nn.Embedding that looks up rows and no more, but "
                f"{describe_module(module)} has a forward of its own (a scale, an offset of "
                f"positions), which would be skipped: put an nn.Embedding in its place and do the "
                f"rest in the module around it, or keep it whole on every rank: for ids [batch, "
                f"sequence], torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate()), "
                f"output_layouts=Replicate())"
            )
        elif not (is_linear(module) or is_conv1d(module)):
            raise TypeError(
                f"{style} is for nn.Linear, {'nn.Embedding ' if self.embeddings else ''}and "
                f"Conv1D with their own forward, not {describe_module(module)}: name the Linear "
                f"modules inside it, or use Norm2D for a norm and Replicate for anything else"
            )
        features = module.weight.shape[1 if is_conv1d(module) else 0]
        if self.parts > 1 and (is_embedding(module) or features % (self.parts * grid.col.size)):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: its {features} "
                f"features are not {self.parts} projections that divide over "
                f"{grid.col.name}={grid.col.size}: use another number of columns, or "
                f"output_layouts=Replicate() without parts"
            )
        if self.dataflow == STATIONARY and self.algorithm not in ("auto", "collective"):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: algorithm "
                f"{self.algorithm!r} is a schedule for moving the weight, but "
                f'dataflow="{STATIONARY}" moves none: use algorithm="auto" or '
                f'dataflow="{self.rule.dataflow}"'
            )
        algorithm = ALGORITHMS[self.algorithm] if self.algorithm != "auto" else None
        if algorithm is not None and algorithm.SQUARE and grid.row.size != grid.col.size:
            raise ValueError(
                f"{describe_module(module)}: algorithm {self.algorithm!r} needs a square grid, "
                f'but the mesh is {describe_mesh(grid.mesh)}: use "summa" or "collective", which '
                f"take any grid"
            )

    def _check_patches(self, module: nn.Module) -> None:
        """Options that are right for a Linear and wrong for a patch embedding."""
        if self.row_dim != 0:
            raise ValueError(
                f"{describe_module(module)}: row_dim={self.row_dim} would split the channels of "
                f"an image over {layouts.TP_ROW}: use row_dim=0, which splits the batch"
            )
        if self.dataflow == STATIONARY or self.algorithm not in ("auto", "collective"):
            raise ValueError(
                f"{describe_module(module)}: a patch embedding gathers its small weight at once, "
                f"so dataflow={self.dataflow!r} and algorithm={self.algorithm!r} mean nothing for "
                f"it: leave them out"
            )
        if self.grad_layouts is not None or self.parts > 1:
            raise ValueError(
                f"{describe_module(module)}: a patch embedding takes no grad_layouts and no parts: "
                f"leave them out"
            )

    def goes_by_rates(self, module: nn.Module, grid: Grid) -> bool:
        if self.algorithm != "auto" or self.dataflow == STATIONARY or grid.axes != TP_COL:
            return False
        return not (is_patch_embedding(module) or is_embedding(module))

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        if is_patch_embedding(module):
            return PatchRunner(self, module, grid, self._weight_layout(module))
        if not is_embedding(module):
            if self.dataflow == STATIONARY:
                return _StationaryRunner(self, module, grid)
            rates = known(grid.mesh) if self.goes_by_rates(module, grid) else None
            own = _LinearRunner(self, module, grid, rates)
            if rates is None or self.dataflow != "auto" or not self.shards_over_row:
                return own
            return _ChoosingRunner(own, _StationaryRunner(self, module, grid), self, rates)
        given_in, given_out, _ = self.given_layouts
        return EmbeddingRunner(
            self.rule.style,
            module,
            grid,
            weight=self._weight_layout(module),
            row_dim=self.row_dim,
            given_in=given_in,
            given_out=given_out,
            default_col=self.output_layouts[1],
            use_local_output=self.use_local_output,
            grad_layouts=self.grad_layouts,
        )

    def entry(self, grid: Grid, takes: Layout, features: int) -> Entry:
        """Where the input of an op that takes it in that layout enters."""
        certain = layouts.is_pair(self.given_layouts[0])
        return Entry(grid, self.input_layouts, takes, self.row_dim, features, certain=certain)

    def exit(self, grid: Grid, gives: Layout, features: int) -> Exit:
        """Where the result of an op that gives it in that layout leaves."""
        local, grads = self.use_local_output, self.grad_layouts
        return Exit(grid, gives, self.output_layouts, features, local, grads)

    def __repr__(self) -> str:
        options = {
            "reshard_after_forward": (self.reshard_after_forward, None),
            "regather_input": (self.regather_input, False),
            "grad_layouts": (self.grad_layouts, None),
            "parts": (self.parts, 1),
        }
        given = [f", {name}={x!r}" for name, (x, default) in options.items() if x != default]
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output}, "
            f"row_dim={self.row_dim}, dataflow={self.dataflow!r}, algorithm={self.algorithm!r}"
            f"{''.join(given)})"
        )


class _LinearRunner(Runner):
    exit: Exit

    def __init__(self, style: _MatmulStyle, module: Any, grid: Grid, rates: Rates | None) -> None:
        self.style = style.rule.style
        transposed = is_conv1d(module)
        out_features, in_features = (
            reversed(module.weight.shape) if transposed else (module.weight.shape)
        )
        gathers = style.rule.gathers_input
        name = style.algorithm
        if name == "auto":
            by_rates = grid.col.transport.goes_by_rates
            name = "pipelined" if style.regather_input else choose_algorithm(by_rates, rates)
        algorithm = ALGORITHMS[name]
        self.dataflow, self.algorithm = style.rule.dataflow, name
        self.in_rounds = name == "pipelined"
        self.may_reshard = style.reshard_after_forward is None
        p, q = (in_features, out_features) if gathers else (out_features, in_features)
        self.grid = grid
        self.row_dim = style.row_dim
        self.in_features, self.out_features = in_features, out_features
        self.parts, self.out_dim = style.parts, int(transposed)
        self.op = LinearOp(
            algorithm=algorithm,
            cut=Cut(grid.row, grid.col, p, q, replicated=not style.shards_over_row),
            gathers_input=gathers,
            transposed=transposed,
            keep_weight=not style.reshard_after_forward,
            regather_input=style.regather_input,
        )
        self.resharding = replace(self.op, keep_weight=False)
        row = Shard(style.row_dim)
        whole = algorithm.WHOLE
        takes: Layout = row, Replicate() if gathers and whole else Shard(-1)
        gives: Layout = row, Partial() if whole and not gathers else Shard(-1)
        self.entry = style.entry(grid, takes, in_features)
        self.exit = style.exit(grid, gives, out_features)

    def resolved(self) -> Resolved:
        return Resolved(self.entry.declared, self.exit.wanted, self.dataflow, self.algorithm)

    def _shards(self, module: Any) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank multiplies its output features by."""
        weight, bias = local_shards(module.weight, module.bias)
        weight, bias = low_precision(weight, bias)
        if self.parts > 1:
            return reshard_fused_grad(weight, self.out_dim, bias, self.parts, self.grid.col)
        return weight, bias

    def prepare(self, module: Any) -> Prepared:
        """Take up the parameters; the weight is to be gathered."""
        weight, bias = self._shards(module)
        shard, op = self.op.as_b(weight.detach()), self.op
        copied = self.parts > 1 or weight.dtype != module.weight.dtype
        params = []
        if copied or self.op.cut.row.size > 1:
            params.append(module.weight)
        if copied and bias is not None:
            params.append(module.bias)
        sources = [values_of(param) for param in params]
        if copied:
            # The shards themselves take deferred gradients; what was made of them does not.
            weight = takes_deferred_grad(weight)
            bias = None if bias is None else takes_deferred_grad(bias)
        return Prepared(weight, bias, lambda: op.algorithm.prefetch(shard, op.cut), sources)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        check_dims(module, x, 2, FEATURES)
        ready = None
        if self.in_rounds and not torch.compiler.is_compiling():
            ready = prepare_parameters(module, self.prepare, self.grid.context)
        sizes, tokens = self.grid.sizes_of(x), self.grid.tokens_of(x)
        operand = self.entry.arriving(x, module, pipelined=self.in_rounds)
        have, op = None, self._op(tokens)
        shards = self._leaves_by(operand.shape) if self.in_rounds else None
        if shards is not None:
            have = self.exit.have[0], Shard(shards.dim)
        moving = None if ready is None else ready.moving
        param = None if torch.compiler.is_compiling() else VersionGuard(module.weight)
        call = Call(op, moving, shards, module, param, self.grid.context)
        if ready is None:
            y = linear2d(operand, *self._shards(module), call)
        else:
            assert ready.weight is not None
            y = linear2d(operand, ready.weight, ready.bias, call)
            running = self.grid.context.running
            if running is not None:
                running.gather_ahead()
        return self.exit.output(y, sizes, have)

    def _op(self, tokens: Sizes | None) -> LinearOp:
        return self.op if self.keeps(tokens, self.grid.col.index) else self.resharding

    def keeps(self, tokens: Sizes | None, column: int) -> bool:
        """Whether a column of ranks keeps its gathered weight: if it is no larger than the input.

        Decided by sizes that all its ranks know: one with fewer tokens has to decide alike. Without
        an embedding that writes them, some modules' sizes are known and others' not: all keep.
        """
        if not self.may_reshard or tokens is None or self.grid.context.tokens is None:
            return self.op.keep_weight
        cut = self.op.cut
        longest = math.prod(tokens) // tokens[self.row_dim]
        longest *= self.grid.row.split(tokens[self.row_dim])[0]
        features = self.in_features
        if not isinstance(self.entry.wanted[1], Replicate):
            features = cut.col.split(features)[column]
        return cut.p * cut.col.split(cut.q)[column] <= longest * features

    def _leaves_by(self, shape: torch.Size) -> Shards | None:
        """How a partial result goes to its output layout, if that is by shards of the tokens."""
        row, col = layouts.normalize(self.exit.wanted, len(shape))
        if not self.exit.have[1].is_partial() or self.grid.col.size == 1:
            return None
        if not isinstance(col, Shard) or col.dim == len(shape) - 1 or row != self.exit.have[0]:
            return None
        return Shards(col.dim, self.grid.col.split(shape[col.dim]), self.grid.col)


class _StationaryRunner(Runner):
    """A Linear whose weight stays: the changes of layout on either side are all that moves."""

    exit: Exit

    def __init__(self, style: _MatmulStyle, module: Any, grid: Grid) -> None:
        self.style = style.rule.style
        transposed = is_conv1d(module)
        out_features, in_features = (
            reversed(module.weight.shape) if transposed else (module.weight.shape)
        )
        self.grid = grid
        self.parts = style.parts
        self.entry = style.entry(grid, style.rule.stationary_input, in_features)
        self.exit = style.exit(grid, style.rule.stationary_output, out_features)
        gathers = style.rule.gathers_input
        p, q = (in_features, out_features) if gathers else (out_features, in_features)
        self.op = LinearOp(
            algorithm=matmul.STATIONARY,
            cut=Cut(grid.row, grid.col, p, q),
            gathers_input=gathers,
            transposed=transposed,
            keep_weight=True,
        )

    def resolved(self) -> Resolved:
        return Resolved(self.entry.declared, self.exit.wanted, STATIONARY, "collective")

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        check_dims(module, x, 2, FEATURES)
        sizes = self.grid.sizes_of(x)
        x = self.entry.shard(x, module)
        weight, bias = local_shards(module.weight, module.bias)
        y = linear2d(x, weight, bias, Call(self.op))
        y = self.exit.output(y, sizes)
        if self.parts > 1:
            # The weight is not to move, so the few tokens' features do.
            y, _ = reshard_fused_grad(y, y.ndim - 1, None, self.parts, self.grid.col)
        return y


class _ChoosingRunner(Runner):
    """Chooses the dataflow by the number of tokens, which every rank knows, each time."""

    def __init__(
        self, own: _LinearRunner, stationary: _StationaryRunner, style: _MatmulStyle, rates: Rates
    ) -> None:
        self.style = own.style
        self.grid, self.rates = own.grid, rates
        self.own, self.stationary, self.exit = own, stationary, own.exit
        self.case = LinearCase(
            rule=style.rule,
            takes=style.input_layouts,
            gives=style.output_layouts,
            in_features=own.in_features,
            out_features=own.out_features,
            rows=own.grid.row.size,
            columns=own.grid.col.size,
        )
        self.chosen: dict[tuple[int, int, bool], str] = {}

    def resolved(self) -> Resolved:
        return self.own.resolved()._replace(dataflow="auto")

    def prepare(self, module: Any) -> Prepared | None:
        return self.own.prepare(module)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        tokens = self.grid.tokens_of(x)
        if tokens is None or torch.compiler.is_compiling():
            return self.own.run(module, forward, x)
        key = math.prod(tokens), x.element_size(), torch.is_grad_enabled()
        dataflow = self.chosen.get(key)
        if dataflow is None:
            count, itemsize, backward = key
            dataflow = choose_dataflow(
                self.case,
                count,
                itemsize,
                self.rates,
                backward=backward,
                keep_weight=self.own.keeps(tokens, column=0),
            )
            self.chosen[key] = dataflow
        stays = dataflow == STATIONARY
        return (self.stationary if stays else self.own).run(module, forward, x)


class Colwise2D(_MatmulStyle):
    """Shard the outputs of a Linear over ``tp_col`` and its inputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.ColwiseParallel`: rename it and
    the plan goes on working. For ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Replicate())``     ``[B/R, S, K]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    Forward gathers the input along ``tp_col``, where it is not whole, and the weight along
    ``tp_row``. On an ``nn.Embedding`` ``W[V, H]`` the hidden dim lies over ``tp_col``, the
    vocabulary over ``tp_row``, and the ids are whole on every rank.

    On an ``nn.Conv2d`` that embeds patches, its kernel equal to its stride, the images
    ``[B, C, H, W]`` are whole on every rank too, and a row embeds its own. The output is
    ``[B, N, H / height, W / width]``, in ``(Shard(0), Shard(1))`` by default. The weight's outputs
    lie over ``tp_col`` and the longest of its other dims over ``tp_row``. A row without images
    gets one of zeros, which :class:`Local2D` drops again.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient. For few tokens, as in decoding:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(-1), Replicate())``    ``[B, S, K/R]``
    result           ``(Partial(), Shard(-1))``      ``[B, S, N/C]``
    ===============  ==============================  ==============================

    The input is brought there from ``input_layouts`` and the result to ``output_layouts``, which
    mean what they always do and have the same defaults. What moves least is an input in the
    transposed layout, ``(Shard(-1), Shard(1))``, gathered along ``tp_col``, or of whole tokens,
    ``(Shard(-1), Replicate())``, gathered by nobody; and an output summed along ``tp_row``:
    ``(Shard(0), Shard(-1))`` or ``(Replicate(), Shard(-1))``. ``tutorials/decode.py`` is a whole
    model laid out so.

    Keyword Args:
        input_layouts: layout of a local input tensor, by default ``Replicate()``: a single
            Placement is the one on ``tp_col``, ``tp_row`` stays ``Shard(row_dim)``; a pair is
            ``(tp_row, tp_col)``. A DTensor knows its own. Ids: ``Replicate()`` on both axes.
        output_layouts: layout of the output, by default ``Shard(-1)``, read likewise. An
            embedding of one-dim ids (positions) has no batch, so its output is replicated along
            ``tp_row``.
        use_local_output: hand on a local tensor (default) or a DTensor of the global shape.
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        dataflow: the style's own (above), ``"weight_stationary"``, or ``"auto"``: whichever takes
            less time for as many tokens, each time, by the arithmetic of
            :mod:`torch_tp2d.planner` and the rates of links and ranks, measured on gloo when a
            mesh gets its first style (:func:`torch_tp2d.planner.assume` gives others). Where
            rates or tokens are not known, under ``torch.compile`` and for an algorithm named
            below, which moves the weight, it is the style's own. An embedding's weight never
            moves, whatever the dataflow.
        algorithm: ``"auto"``, ``"pipelined"``, ``"collective"``, ``"summa"``, ``"bmr"`` or
            ``"cannon"``; the last two need a square grid. ``"auto"`` is ``"pipelined"``, but
            for ``"collective"`` where links are measured (gloo) and transfers take less time than
            rounds cost. A weight that stays takes ``"auto"`` and ``"collective"`` only.
        reshard_after_forward: free the gathered weight after forward and gather it again in
            backward (True), or keep it (False): 1/C of the weight more memory, a third less
            weight traffic. None (default) gathers it again only where it is larger than the
            input that is kept beside it, in a model whose embedding is on the mesh too. Only
            ``"pipelined"`` and ``"collective"`` gather a weight.
        regather_input: gather an input that is split by tokens over ``tp_col`` again for
            backward instead of keeping it: 1/N of it is kept, not 1/R, and it travels three times
            instead of twice. With ``"pipelined"`` in eager; q, k and v share it.
        grad_layouts: layout of the gradient that comes back for a local output, where that is
            not the output's own. The default is right for a head that is whole everywhere
            (every rank computes the same loss: Replicate) and for positions (replicated along
            ``tp_row``, added to other tokens in each row: Partial there).
        parts: how many projections of one size a fused weight holds side by side: 3 for the
            queries, keys and values of GPT-2's ``c_attn``. The weight is sharded as any other
            (and so saved as one matrix), but the output is this rank's share of each projection,
            side by side. For that the ranks along ``tp_col`` exchange columns of their shards
            before the product, at most ``N*K/(R*C)`` elements, and of the gradient after. Weight
            stationary, they exchange the output's features instead. None (default) is 1, and
            :func:`torch_tp2d.parallelize_module` refuses it where the Rowwise2D beside takes so
            much less than this module gives that there must be several; 1 says that there is one,
            or that what belongs together stands side by side (queries, keys and values by heads).

    Raises:
        TypeError: when applied to another kind of module, or to integer weights.
        ValueError: for an unknown option, a mesh that is not ``("tp_row", "tp_col")``, a square
            algorithm on an oblong grid, an algorithm that moves a weight that is to stay, or
            parameters that are on another mesh already.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; our count of what moves is
    ``(C-1)/C * M/R * K + (R-1)/R * K*N/C`` elements received per device in forward, and
    ``(C-1)/C * M * K/R + (R-1)/R * M * N/C`` weight stationary between transposed and feature
    layout (:func:`torch_tp2d.planner.cost.linear_traffic`).

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> plan = {"w1": Colwise2D(), "w2": Rowwise2D()}
        >>> parallelize_module(mlp, mesh, plan)
        >>> mlp(x_of_this_row)     # [B/2, S, H] -> [B/2, S, H]
    """

    rule = layouts.COLWISE
    patches = True


class Rowwise2D(_MatmulStyle):
    """Shard the inputs of a Linear over ``tp_col`` and its outputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.RowwiseParallel`. For
    ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(0), Shard(1))``        ``[N/R, K/C]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Replicate())``     ``[B/R, S, N]``
    ===============  ==============================  ==============================

    Forward gathers the weight along ``tp_row`` and reduces the output along ``tp_col``:
    ``output_layouts=Shard(1)`` scatters it over the sequence (the residual stream of sequence
    parallelism), ``Shard(-1)`` over the hidden dim. On an ``nn.Embedding`` ``W[V, H]`` the
    vocabulary lies over ``tp_col`` and the hidden dim over ``tp_row``, the layout of a tied
    :class:`Colwise2D` head; the ids are whole on every rank.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient; the bias lies as above too, and its gradient is summed along ``tp_row``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Replicate(), Shard(-1))``    ``[B, S, K/C]``
    result           ``(Shard(-1), Partial())``      ``[B, S, N/R]``
    ===============  ==============================  ==============================

    An input in the feature layout is gathered along ``tp_row``; an output is summed along
    ``tp_col`` alone if ``output_layouts`` is the transposed ``(Shard(-1), Shard(1))`` or, with
    whole tokens, ``(Shard(-1), Replicate())``.

    The keyword arguments and errors are :class:`Colwise2D`'s; ``input_layouts`` is ``Shard(-1)``
    and ``output_layouts`` ``Replicate()`` by default.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; received per device in forward:
    ``(R-1)/R * K*N/C + (C-1)/C * M/R * N`` elements; weight stationary, from feature to
    transposed layout, ``(R-1)/R * M * K/C + (C-1)/C * M * N/R``.

    Example::

        >>> plan = {"tok_embeddings": Rowwise2D(output_layouts=Shard(1)),
        ...         "layers.*.feed_forward.w2": Rowwise2D(output_layouts=Shard(1))}
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.ROWWISE


class Block2DParallel(_MatmulStyle):
    """Keep both the input and the output of a Linear in blocks: the feature layout.

    For stacks in which the hidden dim itself stays split over ``tp_col`` (with :class:`Norm2D`
    between), as in the paper's Algorithm 1. For ``X[B, S, K]`` and ``W[N, K]``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    The keyword arguments and errors are :class:`Colwise2D`'s; it does not take an embedding.
    Weight stationary, ``X`` is brought to ``(Shard(-1), Replicate())`` and the result, a sum along
    ``tp_row``, to the feature layout, as by Colwise2D.

    Source: TP2D (doi 10.11992/tis.202411023), Algorithm 1 with ``algorithm="bmr"``.

    Example::

        >>> plan = {"fc1": Block2DParallel(algorithm="bmr"), "fc2": Block2DParallel()}
        >>> parallelize_module(mlp, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.BLOCK
    embeddings = False
