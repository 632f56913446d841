"""What a traced forward tells of an attention module: its inputs, parameters and attributes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..styles.module_kinds import head_counts
from .structure import Structure, own_parameters

__all__ = ["AttentionFacts"]

_Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class AttentionFacts:
    """What :class:`torch_tp2d.Attention2D` has to be told of one module.

    Args:
        module: the attention, which is called ``where`` in the model.
        heads: the number of query heads that its forward was seen to use.
        size: the features of each.
    """

    seen: Structure
    module: nn.Module
    where: str
    heads: int
    size: int

    def options(self, projections: Collection[str]) -> dict[str, Any]:
        """Keyword arguments of the style.

        Args:
            projections: the names of its Linears.

        Raises:
            ValueError: saying what is unclear.
        """
        self._check_inside(projections)
        self._check_counts()
        own = self._own_parameters()
        return {"whole_inputs": self._whole_inputs(), **({"own_parameters": own} if own else {})}

    def _check_inside(self, projections: Collection[str]) -> None:
        """Refuse a module that does more than attend: inside it tensors are local ones."""
        for inner, module in self.module.named_modules(prefix=self.where):
            named = inner in (self.where, *projections) or inner not in self.seen.given
            if named or not own_parameters(module):
                continue
            of_heads = {*self.seen.given.get(inner, ())} & {*projections}
            if not of_heads or any(param.ndim > 1 for param in module.parameters()):
                raise ValueError(
                    f"it holds {inner} beside the projections of an attention: put the attention "
                    f"in a module of its own"
                )

    def _check_counts(self) -> None:
        """Refuse a module that may keep its number of heads under a name that nobody knows."""
        if head_counts(self.module)[0] is not None:
            return
        same = [name for name, x in vars(self.module).items() if type(x) is int and x == self.heads]
        if same:
            raise ValueError(
                f"{same} may be its number of heads, {self.heads}, of which each column has a "
                f"part: call it num_heads, or give Attention2D(local_attributes=)"
            )

    def _whole_inputs(self) -> dict[str, _Dims]:
        """The meaning of the dims of tensor arguments where Attention2D cannot tell by itself."""
        found: dict[str, _Dims] = {}
        batch, seq = self.seen.tokens
        for name, shape in self.seen.arguments.get(self.where, {}).items():
            if shape[:1] == (self.heads * batch,) and self.heads > 1:
                raise ValueError(
                    f"its argument {name} {shape} has the batch and its heads in one dim"
                )
            if len(shape) == 3 and shape[0] == self.heads == batch and shape[2] == seq:
                raise ValueError(
                    f"its argument {name} {shape} may be of each head or of each sample, as there "
                    f"are as many: give inputs= of another batch"
                )
            if len(shape) == 4 and shape[1] == seq and shape[2] == 1:
                if seq == self.heads:
                    raise ValueError(
                        f"its argument {name} {shape} may be of each head or of each token, as "
                        f"there are as many: give inputs= of another length"
                    )
                # A rotary table beside heads that come last but one.
                found[name] = ("batch", "sequence", None, None)
            elif len(shape) > 1 and shape[0] == self.heads != batch:
                # A bias of each head, the same for every sample: by the distance of two tokens.
                found[name] = ("heads", *(None,) * (len(shape) - 1))
        return found

    def _own_parameters(self) -> dict[str, _Dims]:
        """The meaning of the dims of its own parameters: one value for each head, or for all.

        Raises:
            ValueError: for one that may be either, or something else.
        """
        names = own_parameters(self.module)
        own = {name: tuple(getattr(self.module, name).shape) for name in names}
        told: dict[_Dims | tuple[int, ...], str | None] = {}
        if self.heads != self.size:
            told = {(self.heads,): "heads", (self.size,): None}
        if any(shape not in told for shape in own.values()):
            raise ValueError(
                f"an attention with parameters of its own, {own}: say what their dims are, "
                f"Attention2D(own_parameters=)"
            )
        return {name: (told[shape],) for name, shape in own.items()}
