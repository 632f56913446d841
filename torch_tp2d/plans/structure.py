"""What a model is made of, by what it does with its tensors: one forward, traced without values."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch_compat import fake_mode, tree_leaves
from ..styles.module_kinds import embeds, is_conv1d, is_linear
from .sample import ConstantsHaveValues, copy_without_values, sample_inputs

__all__ = ["BATCH", "SEQ", "Attention", "Structure", "own_parameters", "structure_of"]

BATCH, SEQ = 11, 13
"""Sizes of the trace, where no inputs are given: few models have as many heads."""

Sources = Mapping[str, frozenset[str]]
"""The modules that a tensor was made by, and the functions that it has gone through since."""

_ATTENTION = "scaled_dot_product_attention"


@dataclass
class Attention:
    """A call of attention, or a softmax of scores that was written out.

    Args:
        module: the one that was running.
        heads: of the queries.
        sources: of the queries, the keys and the values; of scores those of all together.
    """

    module: str
    heads: int
    sources: Sequence[Sources]

    def given(self) -> set[str]:
        """All that the queries, keys and values, or scores, were made by."""
        return {source for sources in self.sources for source in sources}


@dataclass
class Structure:
    """What a forward did.

    Args:
        tokens: batch and sequence, by which ids of tokens and of positions are told.
        given: of each module that has parameters of its own, in the order of the first calls, what
            its inputs were made by; ``""`` stands for parameters of the model itself.
        shapes: of the first input of each, or of the ids that it makes by itself.
        arguments: of every module, the shapes of the tensors that it was given by name.
        attentions: in the order of their calls.
        output: what the output was made by.
        cut: of each projection, how the sizes of its features were told apart first, if they were.
    """

    tokens: tuple[int, int] = BATCH, SEQ
    given: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    output: dict[str, frozenset[str]] = field(default_factory=dict)
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    picked: set[str] = field(default_factory=set)
    """The modules of whose output tokens were picked by an index that is a tensor."""
    loss: str = ""
    """The name of transformers' loss function, if it was called."""

    def users(self) -> Mapping[str, list[str]]:
        """Of each module, the modules whose inputs were made of what it gave."""
        found: dict[str, list[str]] = defaultdict(list)
        for user, sources in self.given.items():
            for source in sources:
                found[source].append(user)
        return found


def own_parameters(module: nn.Module) -> list[str]:
    """Names of parameters that no module inside has too, as BERT's head has its decoder's bias."""
    inside = {id(p) for child in module.children() for p in child.parameters()}
    return [n for n, p in module.named_parameters(recurse=False) if id(p) not in inside]


def structure_of(model: nn.Module, inputs: Any = None) -> Structure:
    """Trace one forward of a copy of the model.

    Args:
        inputs: a dict of keyword arguments or a tuple of arguments of the model; None where its
            signature says enough.

    Raises:
        ValueError: if its signature says too little, or it cannot run without values.
    """
    try:
        return _traced(model, inputs, labels=True)
    except ValueError:
        if inputs is not None:
            raise
    # Its own loss may take other labels than were made up for it.
    return _traced(model, inputs, labels=False)


def _traced(model: nn.Module, inputs: Any, *, labels: bool) -> Structure:
    mode = fake_mode()
    copied = copy_without_values(model, mode)
    tracer = _Tracer()
    names = {module: name for name, module in copied.named_modules()}
    for module, name in names.items():
        module.register_forward_pre_hook(partial(tracer.enter, name), with_kwargs=True)
        module.register_forward_hook(partial(tracer.leave, name), with_kwargs=True)
    loss = getattr(copied, "loss_function", None)
    if callable(loss):
        copied.loss_function = partial(tracer.loses, loss)  # type: ignore[assignment]
    tracer.knows_own_parameters(copied)
    with mode, torch.no_grad():
        sample = sample_inputs(copied, inputs, BATCH, SEQ)
        if sample is None:
            raise ValueError(
                f"{type(model).__name__} does not say by its signature which ids, images or sounds "
                f"it takes, so it cannot be tried: give inputs=, the arguments of its forward"
            )
        if not labels:
            sample.kwargs = {k: x for k, x in (sample.kwargs or {}).items() if k != "labels"}
        tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        if inputs is not None:
            tracer.found.tokens = _tokens_of(model, sample.ids, tensors)
        try:
            with ConstantsHaveValues(), tracer:
                output = sample.without_cache(model).given_to(copied)
        except Exception as error:  # Whatever a forward of the user's may raise.
            raise ValueError(
                f"{type(model).__name__} cannot run without values, from which its structure would "
                f"be seen: {tracer.running or 'it'} raised {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
    tracer.found.output = tracer.merged(_first_output(output))
    return tracer.found


def _tokens_of(model: nn.Module, ids: Tensor | None, tensors: list[Tensor]) -> tuple[int, int]:
    """Batch and sequence of inputs that are given."""
    first = next((x for x in (ids, *tensors) if x is not None and x.ndim > 1), None)
    if first is None or 1 in (batch_and_sequence := first.shape[:2]):
        raise ValueError(
            f"of {type(model).__name__} inputs= tell no structure: give a batch of two or more "
            f"sequences of two or more tokens"
        )
    batch, seq = batch_and_sequence
    return batch, seq


def _first_output(output: Any) -> Any:
    """Logits or hidden states, without what comes beside them."""
    if isinstance(output, Mapping):
        return output.get("logits", next((x for k, x in output.items() if k != "loss"), None))
    return output[0] if isinstance(output, tuple | list) else output


def _shapes(module: nn.Module, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """Of the tensors among a forward's arguments."""
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return {name: tuple(x.shape) for name, x in given.items() if isinstance(x, Tensor)}


def _has_buffers_for(module: nn.Module, args: Any, output: Any) -> bool:
    """Whether a module without parameters changes what it is given by buffers, as positions do."""
    alike = len(args) > 0 and isinstance(output, Tensor) and isinstance(args[0], Tensor)
    own = any(x.is_floating_point() for x in module.buffers(recurse=False))
    bare = next(module.parameters(), None) is None
    return alike and own and bare and args[0].shape == output.shape and output is not args[0]


def _start(index: Any) -> int | None:
    """Where an index begins to slice the last dim, if that is all that it does."""
    if not isinstance(index, tuple) or index[0] is not Ellipsis or len(index) != 2:
        return None
    last = index[1]
    plain = isinstance(last, slice) and last.step in (None, 1)
    return (last.start or 0) if plain else None


class _Tracer(TorchFunctionMode):
    """Follows each tensor from the module that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Structure()
        self._running: list[str] = []
        # With the tensors, lest another be given the number of one that is gone.
        self._known: dict[int, tuple[Tensor, Sources]] = {}
        self._outputs: dict[int, tuple[Tensor, str]] = {}

    @property
    def running(self) -> str:
        """The innermost module that runs, or that has raised."""
        return self._running[-1] if self._running else ""

    def knows_own_parameters(self, model: nn.Module) -> None:
        """The root's are followed as what a module gave that is called ``""``."""
        for name in own_parameters(model):
            param = getattr(model, name)
            self._known[id(param)] = param, {"": frozenset()}

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        self.found.arguments.setdefault(name, _shapes(module, args, kwargs))
        if own_parameters(module):
            self._given_to(name, args, kwargs)

    def _given_to(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors:
            self.found.shapes.setdefault(name, tuple(tensors[0].shape))
        known = self.found.given.setdefault(name, {})
        for source, through in self.merged(tensors).items():
            known[source] = known.get(source, frozenset()) | through

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running.pop()
        if _has_buffers_for(module, args, output):
            self._given_to(name, args, kwargs)
        if own_parameters(module) and isinstance(output, Tensor):
            self._outputs[id(output)] = output, name
        if is_linear(module) or is_conv1d(module) or embeds(module):
            for x in tree_leaves(output):
                if isinstance(x, Tensor):
                    self._known[id(x)] = x, {name: frozenset()}

    def loses(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's loss function is called."""
        self.found.loss = getattr(function, "__name__", "")
        return function(*args, **kwargs)

    def merged(self, values: Any) -> dict[str, frozenset[str]]:
        """What tensors were made by, all together."""
        found: dict[str, frozenset[str]] = {}
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and id(x) in self._known:
                for source, through in self._known[id(x)][1].items():
                    found[source] = found.get(source, frozenset()) | through
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).strip("_")
        if name == _ATTENTION:
            self._attends([*args, *kwargs.values()][:3])
        elif name == "embedding" and self._running:
            # Of an embedding that makes its positions by itself, given a number of them.
            self.found.shapes.setdefault(self._running[-1], tuple(args[0].shape))
        elif name == "softmax" and isinstance(args[0], Tensor) and args[0].ndim == 4:
            scores = args[0]
            self.found.attentions.append(
                Attention(self._running[-1], scores.shape[1], [self.merged(scores)])
            )
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name == "getitem" and self._is_picked(*args):
            _, source = self._outputs[id(args[0])]
            self.found.picked.add(source)
            self._known[id(out)] = out, {source: frozenset()}
        elif made and name not in ("get", "set"):
            sources = self.merged((args, kwargs))
            self._cuts(name, args, sources, made)
            for x in made:
                before = self.merged(x)
                through = {s: t | {name} for s, t in {**before, **sources}.items()}
                self._known[id(x)] = x, through
        elif made:
            for x in made:
                self._known.setdefault(id(x), (x, self.merged(args)))
        return out

    def _is_picked(self, x: Tensor, index: Any) -> bool:
        """Whether what a module gave is indexed by a tensor."""
        return id(x) in self._outputs and any(isinstance(i, Tensor) for i in tree_leaves(index))

    def _attends(self, given: Sequence[Tensor]) -> None:
        sources = [self.merged(x) for x in given]
        self.found.attentions.append(Attention(self._running[-1], given[0].shape[-3], sources))

    def _cuts(self, name: str, args: Any, sources: Sources, made: Sequence[Tensor]) -> None:
        """How the features of a projection are told apart by the first function that they meet."""
        for source, through in sources.items():
            x, known = made[0], self.found.cut.get(source, ())
            if through:
                continue
            if name == "getitem" and x.ndim == args[0].ndim and _start(args[1]) == sum(known):
                # Slices of the features, one after the other.
                self.found.cut[source] = (*known, x.shape[-1])
            elif source not in self.found.cut:
                # Parts one after the other, or the dims of a view.
                told = [y.shape[-1] for y in made] if len(made) > 1 else list(x.shape[2:])
                if x.ndim > 3 or len(made) > 1:
                    self.found.cut[source] = tuple(told)
