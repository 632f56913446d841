"""The runner of an attention module, which runs it on this rank's heads and tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..._torch_compat.tensors import tree_map_only
from ..._tracing import in_graph
from ...mesh.grid import Grid, describe_mesh
from ...mesh.handed import hand_out, said_of
from ..base import Resolved, Runner
from ..intercept import Intercept
from ..local_math import run_locally
from ..masks import Masks
from ..module_kinds import describe_module, input_width, projects
from .call import Call
from .config import local_config
from .tokens import Tokens
from .users_errors import place_in_users_code

if TYPE_CHECKING:
    from .style import Attention2D

__all__ = ["AttentionRunner"]


class AttentionRunner(Runner):
    style = "Attention2D"

    def __init__(self, style: Attention2D, module: nn.Module, grid: Grid) -> None:
        self.grid, self.by = grid, describe_module(module)
        self.row_dim = style.row_dim
        self.declared = style.input_layouts
        self.algorithm = style.algorithm
        if style.algorithm == "auto":
            self.algorithm = "local" if style.row_dim == 0 else "ring"
        self.balanced = style.balanced
        self.whole_inputs = style.whole_inputs
        self.summed_inputs = style.summed_inputs
        self.own_parameters = tuple(style.own_parameters)
        parameters = inspect.signature(module.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.heads = style.heads(module, grid.col)
        self.widths = frozenset(map(input_width, filter(projects, module.modules())))
        """The features that projections inside take, by which states to attend to are known."""
        self.masks = Masks(grid, style.row_dim, None, (), owner=module)
        self.local_values = style.local_values(module, grid.col)
        self.config_values = style.config_values(module, grid.col)

    def resolved(self) -> Resolved:
        return Resolved(self.declared, algorithm=self.algorithm, runs_parameters=False)

    def installed(self, module: nn.Module) -> None:
        for name, value in self.local_values.items():
            setattr(module, name, value)
        if self.config_values:
            module.config = local_config(module.config, self.config_values)

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self.grid.context
        known, around = context.tokens, context.in_attention
        context.in_attention = True
        try:
            result = self._run(module, forward, *args, **kwargs)
            return self._without_stand_in(result) if known is None else result
        finally:
            context.in_attention = around
            if known is None:
                # Without an embedding, nothing updates the sizes in the next pass, so they must not
                # outlive this module.
                context.tokens = None

    def _without_stand_in(self, result: Any) -> Any:
        """The module's result without the stand-in token of a row that has none.

        The sizes by which the token is recognized came from a DTensor given to this module, and
        later modules do not have them.
        """
        tokens, row, dim = self.grid.context.tokens, self.grid.row, self.row_dim
        if tokens is None or row.split(tokens[dim])[row.index] or not tokens[dim]:
            return result

        def without(x: Tensor) -> Tensor:
            # Tensors of 4 dims are attention weights, which are not returned with row_dim=1.
            if isinstance(x, DTensor) or x.ndim not in (3, 4 - dim) or x.shape[dim] != 1:
                return x
            return hand_out(x.narrow(dim, 0, 0), said_of(x))

        return tree_map_only(Tensor, without, result)

    def _run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens = Tokens(self, module, _hidden_states(module, args, kwargs))
        names = (*self.names, *(f"argument {n}" for n in range(len(self.names), len(args))))
        args = tuple(tokens.enter(value, name) for value, name in zip(args, names, strict=False))
        kwargs = {name: tokens.enter(value, name) for name, value in kwargs.items()}
        self._check_keys(module)
        call = Call(self, module, tokens)
        cause = None
        try:
            with Intercept(call.drop, call, self.masks.here):
                result = self._with_own_parameters(module, forward, args, kwargs)
        except RuntimeError as error:
            # Attention in the module's own code may have failed on head counts that do not match,
            # and then the message below is the helpful one.
            if call.happened or not self.why_not_eager():
                self._explain(module, error)
                raise
            cause = error
        except (ValueError, TypeError) as error:
            self._explain(module, error)
            raise
        why = "" if call.happened else self.why_not_eager()
        if why:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)} did not call "
                f"scaled_dot_product_attention, but {why}"
            ) from cause
        return result

    def _explain(self, module: nn.Module, error: Exception) -> None:
        """Say what the module's own code sees here, if that is where an error comes from.

        Raises:
            ValueError: if it is, on a grid that splits heads.
        """
        place = None if in_graph() or self.grid.col.size == 1 else place_in_users_code(error)
        if place is None or (self.heads is not None and self.heads.whole_query):
            return
        divided = ", ".join(f"{name}={value}" for name, value in self.local_values.items())
        raise ValueError(
            f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: its own code "
            f"fails in {place}: {error}. What its projections give it are the features of this "
            f"column's heads, and of its attributes only these are divided to fit: "
            f"{divided or 'none'}. Take sizes from what the projections give, such as "
            f"q.size(-1), .chunk(3, -1) and .view(B, T, -1), not from its input or from other "
            f"attributes, or name those in Attention2D(local_attributes=...)"
        ) from error

    def _with_own_parameters(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's forward with its own parameters sharded to this column's heads."""
        if not self.own_parameters:
            return forward(*args, **kwargs)
        own = [(module, name) for name in self.own_parameters]
        return run_locally(own, forward, args, kwargs, self.grid)

    def check(self, module: nn.Module) -> None:
        """Refuse a Hugging Face module that is set to compute its attention itself.

        Raises:
            ValueError: if that would be wrong.
        """
        how = getattr(getattr(module, "config", None), "_attn_implementation", None)
        why = "" if how in (None, "sdpa") else self.why_not_eager()
        if why:
            raise ValueError(
                f"{describe_module(module)} computes its attention by {how!r} and not by "
                f"scaled_dot_product_attention, but {why}"
            )

    def _check_keys(self, module: nn.Module) -> None:
        """Refuse ``algorithm="local"`` unless a projection gathers keys along ``tp_row``.

        Raises:
            ValueError: if none does, as the keys of other rows would be missing.
        """
        if self.row_dim == 0 or self.grid.row.size == 1 or self.algorithm != "local":
            return
        exits = (getattr(child.__dict__.get("_tp2d"), "exit", None) for child in module.modules())
        outputs = [leaves.wanted[0] for leaves in exits if leaves is not None]
        if Replicate() not in outputs:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: with "
                f'algorithm="local" its projections have to gather keys and values along '
                f"{self.grid.row.name}, but none does: give them the styles of "
                f'attention_projections(whole_keys=True), or use algorithm="ring"'
            )

    def why_not_eager(self) -> str:
        """Why attention by the module's own code, on local projections, would be wrong.

        Empty if it would be right.
        """
        row, col, heads = self.grid.row, self.grid.col, self.heads
        mend = 'have it do so (Hugging Face: attn_implementation="sdpa")'
        if self.row_dim == 1 and row.size > 1 and self.algorithm != "local":
            return (
                f"its sequence is split over {row.name}, so it attended to a part of the keys: "
                f"{mend}, or gather the keys: attention_projections(whole_keys=True) with "
                f'algorithm="local"'
            )
        # With one key head, dividing the number of query groups is enough for the module.
        if heads is not None and col.size > 1 and heads.whole_key:
            if heads.whole_query or heads.key != 1:
                return (
                    f"its {heads.query} query and {heads.key} key heads do not divide over "
                    f"{col.name}, so each rank has to compute a share of them: {mend}, or use a "
                    f"mesh whose {col.name} divides them"
                )
        return ""


def _hidden_states(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return value
    raise TypeError(
        f"{describe_module(module)}: Attention2D needs hidden states, a floating point tensor "
        f"[batch, sequence, hidden], as an argument"
    )
