"""The structure of a model, from what one forward, traced without values, does with tensors."""

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

from .._torch_compat.tensors import fake_mode, tree_leaves
from ..styles.module_kinds import embeds, is_conv1d, is_linear
from .sample import ConstantsHaveValues, copy_without_values, sample_inputs

__all__ = ["BATCH", "SEQ", "Attention", "Structure", "own_parameters", "structure_of"]

BATCH, SEQ = 11, 13
"""Sizes of the traced inputs if none are given. Few models have as many heads, so that a dim of
such a size is not mistaken for one of heads."""

Sources = Mapping[str, frozenset[str]]
"""The modules that a tensor comes from, and the functions that it has gone through since."""

_ATTENTION = "scaled_dot_product_attention"


@dataclass
class Attention:
    """A call of ``scaled_dot_product_attention``, or a softmax of scores that a model computes.

    Args:
        module: the name of the module that was running.
        heads: how many heads the queries have.
        sources: one for the queries, one for the keys and one for the values; for scores, a single
            one.
    """

    module: str
    heads: int
    sources: Sequence[Sources]

    def given(self) -> set[str]:
        """All modules that the queries, keys and values, or the scores, come from."""
        return {source for sources in self.sources for source in sources}


@dataclass
class Structure:
    """What one forward did.

    Args:
        tokens: the sizes of batch and sequence, which tell ids of tokens from ids of positions.
        given: by module with parameters of its own, in the order of first calls: what its inputs
            come from; the source ``""`` stands for parameters of the model itself.
        shapes: by such a module, the shape of its first input, or of the ids that it makes itself.
        arguments: by module, the shapes of its tensor arguments, by their names.
        attentions: in the order of their calls.
        output: what the model's output comes from.
        cut: by projection, the sizes into which its output features were first split, if they were.
    """

    tokens: tuple[int, int] = BATCH, SEQ
    given: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    output: dict[str, frozenset[str]] = field(default_factory=dict)
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    """The modules from which any part of what the model returns comes."""
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By source, the functions that took what was made of it, outside of projections."""
    picked: set[str] = field(default_factory=set)
    """The modules from whose output tokens were picked by a tensor index."""
    loss: str = ""
    """The name of the loss function of transformers, if it was called."""

    def users(self) -> Mapping[str, list[str]]:
        """By module, the modules whose inputs come from its output."""
        found: dict[str, list[str]] = defaultdict(list)
        for user, sources in self.given.items():
            for source in sources:
                found[source].append(user)
        return found


def own_parameters(module: nn.Module) -> list[str]:
    """Names of a module's direct parameters, without those that a module inside it has too.

    BERT's head, for example, has the bias of its decoder as a parameter too.
    """
    inside = {id(p) for child in module.children() for p in child.parameters()}
    return [n for n, p in module.named_parameters(recurse=False) if id(p) not in inside]


def structure_of(model: nn.Module, inputs: Any = None) -> Structure:
    """Trace one forward of a copy of the model.

    Args:
        inputs: a dict of keyword arguments or a tuple of arguments of the model; None if its
            signature tells them.

    Raises:
        ValueError: if the signature does not tell the inputs, or the model cannot run without
            values.
    """
    try:
        return _traced(model, inputs, labels=True)
    except ValueError:
        if inputs is not None:
            raise
    # The model's own loss may take other labels than the made-up ones: try without a loss.
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
    # What the model makes without saying where is where the copy is.
    with torch.device("cpu"), mode, torch.no_grad():
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
        except Exception as error:  # A user's forward may raise anything.
            raise ValueError(
                f"{type(model).__name__} cannot run without values, from which its structure would "
                f"be seen: {tracer.running or 'it'} raised {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
    tracer.found.output = tracer.merged(_first_output(output))
    tracer.found.returned = {*tracer.merged(output)}
    return tracer.found


def _tokens_of(model: nn.Module, ids: Tensor | None, tensors: list[Tensor]) -> tuple[int, int]:
    """The sizes of batch and sequence of given inputs."""
    first = next((x for x in (ids, *tensors) if x is not None and x.ndim > 1), None)
    if first is None or 1 in (batch_and_sequence := first.shape[:2]):
        raise ValueError(
            f"of {type(model).__name__} inputs= tell no structure: give a batch of two or more "
            f"sequences of two or more tokens"
        )
    batch, seq = batch_and_sequence
    return batch, seq


def _first_output(output: Any) -> Any:
    """The logits or hidden states of a model's output, without its other fields."""
    if isinstance(output, Mapping):
        return output.get("logits", next((x for k, x in output.items() if k != "loss"), None))
    return output[0] if isinstance(output, tuple | list) else output


def _shapes(module: nn.Module, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors among a forward's arguments, by name."""
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return {name: tuple(x.shape) for name, x in given.items() if isinstance(x, Tensor)}


def _has_buffers_for(module: nn.Module, args: Any, output: Any) -> bool:
    """Whether a module without parameters changes its input by a buffer, as fixed positions do."""
    alike = len(args) > 0 and isinstance(output, Tensor) and isinstance(args[0], Tensor)
    own = any(x.is_floating_point() for x in module.buffers(recurse=False))
    bare = next(module.parameters(), None) is None
    return alike and own and bare and args[0].shape == output.shape and output is not args[0]


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """A function's first arguments, of these names, however they were given."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def _start(index: Any) -> int | None:
    """Where an index of the form ``[..., start:stop]`` starts; None for any other index."""
    if not isinstance(index, tuple) or index[0] is not Ellipsis or len(index) != 2:
        return None
    last = index[1]
    plain = isinstance(last, slice) and last.step in (None, 1)
    return (last.start or 0) if plain else None


class _Tracer(TorchFunctionMode):
    """Follows each tensor from the modules that it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Structure()
        self._running: list[str] = []
        self._is_projection: list[bool] = []
        # Holds the tensors, so that the id of a freed one is not taken by another.
        self._known: dict[int, tuple[Tensor, Sources]] = {}
        self._outputs: dict[int, tuple[Tensor, str]] = {}

    @property
    def running(self) -> str:
        """The name of the innermost module that runs, or that has raised."""
        return self._running[-1] if self._running else ""

    def knows_own_parameters(self, model: nn.Module) -> None:
        """Follow the root's own parameters like outputs of a module called ``""``."""
        for name in own_parameters(model):
            param = getattr(model, name)
            self._known[id(param)] = param, {"": frozenset()}

    @property
    def _in_projection(self) -> bool:
        return self._is_projection[-1] if self._is_projection else False

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        self._is_projection.append(is_linear(module) or is_conv1d(module))
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
        self._is_projection.pop()
        if _has_buffers_for(module, args, output):
            self._given_to(name, args, kwargs)
        if own_parameters(module) and isinstance(output, Tensor):
            self._outputs[id(output)] = output, name
        if is_linear(module) or is_conv1d(module) or embeds(module):
            for x in tree_leaves(output):
                if isinstance(x, Tensor):
                    self._known[id(x)] = x, {name: frozenset()}

    def loses(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model's loss function and note its name."""
        self.found.loss = getattr(function, "__name__", "")
        return function(*args, **kwargs)

    def merged(self, values: Any) -> dict[str, frozenset[str]]:
        """The sources of all the tensors together."""
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
            self._attends(_named(("query", "key", "value"), args, kwargs))
        elif name == "embedding" and self._running:
            # An embedding that makes its position ids itself is not given any: note their shape.
            (ids,) = _named(("input",), args, kwargs)
            if isinstance(ids, Tensor):
                self.found.shapes.setdefault(self._running[-1], tuple(ids.shape))
        elif name == "softmax":
            (scores,) = _named(("input",), args, kwargs)
            if isinstance(scores, Tensor) and scores.ndim == 4:
                self.found.attentions.append(
                    Attention(self.running, scores.shape[1], [self.merged(scores)])
                )
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name == "getitem" and self._is_picked(*args):
            _, source = self._outputs[id(args[0])]
            self.found.picked.add(source)
            self._known[id(out)] = out, {source: frozenset()}
        elif made and name not in ("get", "set"):
            sources = self.merged((args, kwargs))
            self._cuts(name, args, sources, made)
            if not self._in_projection:
                for source in sources:
                    self.found.functions[source].add(name)
            for x in made:
                before = self.merged(x)
                through = {s: t | {name} for s, t in {**before, **sources}.items()}
                self._known[id(x)] = x, through
        elif made:
            for x in made:
                self._known.setdefault(id(x), (x, self.merged(args)))
        return out

    def _is_picked(self, x: Tensor, index: Any) -> bool:
        """Whether a module's output is indexed by a tensor."""
        return id(x) in self._outputs and any(isinstance(i, Tensor) for i in tree_leaves(index))

    def _attends(self, given: Sequence[Tensor]) -> None:
        sources = [self.merged(x) for x in given]
        self.found.attentions.append(Attention(self._running[-1], given[0].shape[-3], sources))

    def _cuts(self, name: str, args: Any, sources: Sources, made: Sequence[Tensor]) -> None:
        """Note how the first function after a projection splits its output features."""
        for source, through in sources.items():
            x, known = made[0], self.found.cut.get(source, ())
            if through:
                continue
            if name == "getitem" and x.ndim == args[0].ndim and _start(args[1]) == sum(known):
                # Slices of the features, each of which starts where the one before ends.
                self.found.cut[source] = (*known, x.shape[-1])
            elif source not in self.found.cut:
                # Several outputs are consecutive parts; else the dims of a view tell the sizes.
                told = [y.shape[-1] for y in made] if len(made) > 1 else list(x.shape[2:])
                if x.ndim > 3 or len(made) > 1:
                    self.found.cut[source] = tuple(told)
