"""The runners of a Linear: one moves the weight, one does not, one chooses the faster of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._tracing import in_graph
from ...comm import Pending, reshard_fused_grad
from ...mesh.grid import Grid
from ...mesh.handed import hand_out, said_of
from ...mesh.layouts import STATIONARY, Layout
from ...ops import matmul
from ...ops.matmul import ALGORITHMS, IN_ROUNDS, Call, Cut, LinearOp, Shards, linear2d
from ...ops.matmul.call import low_precision
from ...ops.matmul.cut import Algorithm
from ...ops.matmul.pipelined import takes_deferred_grad
from ...planner.choice import LinearCase, choose_algorithm, choose_dataflow
from ...planner.rates import Rates
from ...runtime.context import Sizes, autocast_dtype, in_backward
from ...runtime.prefetch import Prepared, prepare_parameters
from ...runtime.reductions import drop_unfinished
from ...runtime.versions import VersionGuard
from ..base import FEATURES, Resolved, Runner, check_dims
from ..boundary import Entry, Exit, dims_needed
from ..dtensors import local_shards, values_of
from ..module_kinds import describe_module, is_conv1d
from .options import MatmulOptions

__all__ = ["ChoosingRunner", "LinearRunner", "StationaryRunner"]


class _OpRunner(Runner):
    """A Linear as one op on its shards, between the layouts of its input and its output."""

    entry: Entry
    exit: Exit

    def __init__(
        self,
        style: MatmulOptions,
        module: Any,
        grid: Grid,
        algorithm: Algorithm,
        *,
        keep_weight: bool,
        keep_between: bool = False,
        regather_input: bool = False,
    ) -> None:
        self.style = style.rule.style
        self.grid = grid
        transposed = is_conv1d(module)
        self.out_features, self.in_features = (
            reversed(module.weight.shape) if transposed else (module.weight.shape)
        )
        self.parts = style.part_sizes(self.out_features) if style.parts != 1 else ()
        gathers = style.rule.gathers_input
        p, q = self.in_features, self.out_features
        if not gathers:
            p, q = q, p
        cut = Cut(grid.row, grid.col, p, q, replicated=not style.shards_over_row)
        self.op = LinearOp(
            algorithm=algorithm,
            cut=cut,
            gathers_input=gathers,
            transposed=transposed,
            keep_weight=keep_weight or cut.stays,
            keep_between=keep_between,
            regather_input=regather_input,
            reduce_dtype=style.reduce_dtype,
        )


class LinearRunner(_OpRunner):
    """A Linear whose weight is gathered, or moved in other ways, to the ranks of the tokens."""

    def __init__(self, style: MatmulOptions, module: Any, grid: Grid, rates: Rates | None) -> None:
        name = style.algorithm
        if name == "auto":
            ranks, by_rates = grid.row.size * grid.col.size, grid.col.transport.goes_by_rates
            # Only pipelined keeps gathered tokens, which it may gather again instead.
            chosen = choose_algorithm(ranks, by_rates, rates)
            name = "pipelined" if style.regather_input else chosen
        algorithm = ALGORITHMS[name]
        reshard, keeps = style.reshard_after_forward, grid.row.transport.keeps_gathered
        super().__init__(
            style,
            module,
            grid,
            algorithm,
            keep_weight=keeps if reshard is None else not reshard,
            keep_between=not reshard,
            regather_input=style.regather_input,
        )
        self.dataflow, self.algorithm = style.rule.dataflow, name
        self.in_rounds = name in IN_ROUNDS
        self.axis = replace(grid.col, fuses=name == "fused")
        grid.context.fuses |= self.axis.fuses
        self.may_reshard = reshard is None and keeps
        self.row_dim = style.row_dim
        self.resharding = self.op if self.op.cut.stays else replace(self.op, keep_weight=False)
        row = Shard(style.row_dim)
        gathers, whole = self.op.gathers_input, algorithm.WHOLE
        takes: Layout = row, Replicate() if gathers and whole else Shard(-1)
        self.sums_along_col = whole and not gathers
        gives: Layout = row, Partial() if self.sums_along_col else Shard(-1)
        self.entry = style.entry(grid, takes, self.in_features)
        self.exit = style.exit(grid, gives, self.out_features, describe_module(module))

    def resolved(self) -> Resolved:
        return Resolved(self.entry.declared, self.exit.wanted, self.dataflow, self.algorithm)

    def _shards(self, weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
        """The shards of weight and bias that produce this rank's output features.

        In the dtype of autocast, and resharded if the weight holds fused projections. A run reads
        the two from its module once: a parametrized one is computed each time.
        """
        weight, bias = local_shards(weight, bias)
        if autocast_dtype(weight.device.type) is not None:
            weight, bias = low_precision(weight, bias)
        if self.parts:
            return reshard_fused_grad(
                weight, int(self.op.transposed), bias, self.parts, self.grid.col
            )
        return weight, bias

    def prepare(self, module: Any) -> Prepared:
        """The parameters as the op takes them, and the gather of the weight, not started yet."""
        own, own_bias = module.weight, module.bias
        weight, bias = self._shards(own, own_bias)
        shard, op = self.op.as_b(weight.detach()), self.op

        def gather() -> Pending:
            kept = self.grid.context.accumulation.gathered(module, own, shard.dtype)
            return op.algorithm.prefetch(shard, op.cut) if kept is None else kept

        copied = bool(self.parts) or weight.dtype != own.dtype
        params = []
        if copied or self.op.cut.row.size > 1:
            params.append(own)
        if copied and bias is not None:
            params.append(own_bias)
        sources = [values_of(param) for param in params]
        if copied:
            # A parameter's own shard takes a deferred gradient, but a copy made of it does not
            # unless it is wrapped.
            weight = takes_deferred_grad(weight)
            bias = None if bias is None else takes_deferred_grad(bias)
        return Prepared(weight, bias, gather, sources, own)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        check_dims(module, x, 2 + self.row_dim, FEATURES)
        context, traced = self.grid.context, in_graph()
        if not traced and context.backwards and not in_backward():
            drop_unfinished(context)
        ready = None
        sizes, tokens = self.grid.sizes_and_tokens(x)
        if self.in_rounds and not traced:
            self.entry.check(x, module, tokens)
            ready = prepare_parameters(module, self.prepare, context)
        operand = self.entry.arriving(x, module, pipelined=self.in_rounds, tokens=tokens)
        op = self._op(tokens)
        shards = self._leaves_by(operand.shape) if self.in_rounds else None
        scattered = None if shards is None else shards.dim
        if traced:
            call = Call(op, shards=shards)
            y = linear2d(operand, *self._shards(module.weight, module.bias), call)
            return self.exit.output(y, sizes, scattered)
        if ready is None:
            own, moving = module.weight, None
            weight, bias = self._shards(own, module.bias)
        else:
            assert ready.weight is not None
            own, moving, weight, bias = ready.own, ready.moving, ready.weight, ready.bias
        operand_of = partial(self._operand, own)
        call = Call(op, moving, shards, module, VersionGuard(own), context, operand_of)
        y = linear2d(operand, weight, bias, call)
        if ready is not None:
            running = context.running
            if running is not None:
                running.gather_ahead()
        return self.exit.output(y, sizes, scattered, tokens)

    def _operand(self, weight: Any) -> Tensor:
        """The op's operand of a weight."""
        return self._shards(weight, None)[0]

    def _op(self, tokens: Sizes | None) -> LinearOp:
        return self.op if self.keeps(tokens, self.grid.col.index) else self.resharding

    def keeps(self, tokens: Sizes | None, column: int) -> bool:
        """Whether a mesh column keeps its gathered weight: if that is no larger than the input.

        All ranks of the column have to decide alike, also those with fewer tokens, so the input of
        the row with the most tokens counts. Without an embedding that notes the model's sizes, they
        are known for some modules only, and then all modules keep their weights.
        """
        if not self.may_reshard or tokens is None or self.grid.context.tokens is None:
            return self.op.keep_weight
        cut = self.op.cut
        of_a_row = list(tokens)
        of_a_row[self.row_dim] = self.grid.row.split(tokens[self.row_dim])[0]
        longest = math.prod(of_a_row)
        features = self.in_features
        if not self.entry.wanted[1].is_replicate():
            features = cut.col.split(features)[column]
        return cut.p * cut.col.split(cut.q)[column] <= longest * features

    def _leaves_by(self, shape: torch.Size) -> Shards | None:
        """The shards to which a partial result is reduce-scattered, if the output splits tokens."""
        if self.grid.col.size == 1 or not self.sums_along_col:
            return None
        way = self.exit.route(len(shape))
        col = way.dst[1]
        if not way.row_stays or not isinstance(col, Shard) or col.dim == len(shape) - 1:
            return None
        return Shards(col.dim, self.axis.split(shape[col.dim]), self.axis)


class StationaryRunner(_OpRunner):
    """A Linear whose weight does not move: only the input and the output are redistributed."""

    def __init__(self, style: MatmulOptions, module: Any, grid: Grid) -> None:
        super().__init__(style, module, grid, matmul.STATIONARY, keep_weight=True)
        self.entry = style.entry(grid, style.rule.stationary_input, self.in_features)
        gives, by = style.rule.stationary_output, describe_module(module)
        self.exit = style.exit(grid, gives, self.out_features, by)

    def resolved(self) -> Resolved:
        return Resolved(self.entry.declared, self.exit.wanted, STATIONARY, "collective")

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        check_dims(module, x, dims_needed(self.entry, self.exit), FEATURES)
        sizes = self.grid.sizes_of(x)
        x = self.entry.shard(x, module)
        own = module.weight
        weight, bias = local_shards(own, module.bias)
        guard = None if in_graph() else VersionGuard(own)
        y = linear2d(x, weight, bias, Call(self.op, param=guard))
        y = self.exit.output(y, sizes)
        if self.parts:
            # The weight must not move, so the features of the output are exchanged instead.
            said = said_of(y)
            y, _ = reshard_fused_grad(y, y.ndim - 1, None, self.parts, self.grid.col)
            y = hand_out(y, said)
        return y


class ChoosingRunner(Runner):
    """Chooses the dataflow at each call, by the number of tokens, which every rank knows."""

    def __init__(
        self, own: LinearRunner, stationary: StationaryRunner, style: MatmulOptions, rates: Rates
    ) -> None:
        self.style = own.style
        self.grid, self.rates = own.grid, rates
        self.own, self.stationary = own, stationary
        self.exit, self.parts, self.in_rounds = own.exit, own.parts, own.in_rounds
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
        if tokens is None or in_graph():
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
