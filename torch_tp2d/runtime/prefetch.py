"""Preparing parameters before they are needed: those of the next modules, during this one.

This has two effects. The weights of the next modules are gathered ahead, as FSDP2 does. And in
backward the nodes that wait for the reductions of parameters' gradients run later, since autograd
runs the nodes made last first: by then the reductions have arrived.

The modules that come next are predicted from the model's previous forward, and in backward
(:mod:`~torch_tp2d.runtime.regather`) from this forward. Every rank has seen the same order, so
every rank starts the same gathers in the same order. Nothing is prepared for longer than one
forward of the model that :func:`torch_tp2d.parallelize_module` was called with, nor across a hook
of the user's, so that changes of parameters between two forwards, or in a hook, take effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat.modules import forward_hooks, forward_pre_hooks, parameters_of
from .._torch_compat.tensors import tree_leaves
from .._tracing import eager_only, in_graph
from ..comm import Pending
from .context import Context, OnBehalf, autocast_dtype, directly, in_backward, selective_region
from .reductions import backward_of, drop_unfinished
from .regather import GATHERED_AHEAD, WeightRegather, is_whole
from .unseen import UnseenChanges
from .versions import to_compare, versions

__all__ = [
    "AHEAD",
    "Forward",
    "Pass",
    "Prepared",
    "prepare_parameters",
]

AHEAD = 8
"""How many modules ahead parameters are prepared: as many as a transformer layer has."""


@dataclass
class Prepared:
    """A module's parameters as its op takes them.

    Args:
        gather: starts the gather of the weight; None if there is nothing to gather.
        sources: the tensors whose values the operands are, or will be, copied from.
        own: the module's weight as it was read, if a :class:`~torch_tp2d.ops.matmul.Call` takes it.
    """

    weight: Tensor | None
    bias: Tensor | None
    gather: Callable[[], Pending] | None = None
    sources: Sequence[Tensor] = ()
    own: Tensor | None = None
    on_behalf: OnBehalf = directly
    _then: Sequence[tuple[Tensor, Tensor]] = ()
    _moving: Pending | None = None

    def start(self) -> None:
        """Start the gather, unless there is none or it has started."""
        if self._moving is None and self.gather is not None:
            self._moving = self.on_behalf(self.gather)

    @property
    def moving(self) -> Pending:
        """The gather of the weight, which has to have started."""
        assert self._moving is not None
        return self._moving

    def drop(self) -> None:
        """Await the gather, if it has started, as its result will not be used."""
        if self._moving is not None:
            self._moving.wait()

    def remember(self) -> None:
        """Copy the current values of ``sources``, for :meth:`compare`."""
        self._then = [pair for pair in map(to_compare, self.sources) if pair is not None]

    def compare(self, module: nn.Module, unseen: UnseenChanges) -> None:
        """Note whether a parameter was changed since :meth:`remember` without torch's seeing it."""
        if self._then:
            changed = not all(torch.equal(now, then) for now, then in self._then)
            unseen.note(module, changed=changed)


class _Seen:
    """The state that prepared parameters depend on.

    It holds the parameters themselves, as an id can be reused once an object is freed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params: list[Any] = []
        self.state: list[Any] = [torch.is_grad_enabled()]
        own = parameters_of(module)
        for name in ("weight", "bias"):
            # By the module's own lookup only what is parametrized, as that takes longer.
            param = own[name] if name in own else getattr(module, name, None)
            if param is not None:
                self.params.append(param)
                self.state += (param.requires_grad, *versions(param))
        self.state.append(_autocast(self.params))

    def still_holds(self, now: _Seen) -> bool:
        return (
            self.state == now.state
            and len(self.params) == len(now.params)
            and all(map(is_, self.params, now.params))
        )


def _autocast(params: Sequence[Tensor]) -> torch.dtype | None:
    return autocast_dtype(params[0].device.type if params else "cpu")


class Pass:
    """One forward of a model: the order that is foreseen for it, and what was prepared ahead.

    Args:
        foreseen: the modules in the order of the previous forward.
        unseen: notes whether what was prepared ahead is out of date.
        open_after: for each module, whether the next one may be prepared before it has run.
    """

    def __init__(
        self, foreseen: Sequence[nn.Module], open_after: Sequence[bool], unseen: UnseenChanges
    ) -> None:
        self.foreseen, self.open_after, self.unseen = foreseen, open_after, unseen
        self.ran: list[nn.Module] = []
        self.selective: list[bool] = []
        """For each module in ``ran``, whether it ran in a region of selective checkpointing."""
        self.last_regather: WeightRegather | None = None
        self._as_foreseen = bool(foreseen)
        self._ahead: deque[tuple[_Seen, Prepared]] = deque()

    def __repr__(self) -> str:
        return f"Pass({len(self.ran)} modules of {len(self.foreseen)}, {len(self._ahead)} ahead)"

    def take(self, module: nn.Module, prepare: Callable[[Any], Prepared]) -> Prepared:
        """Return the parameters of the module that is about to run, and prepare the next ones."""
        at, selective = len(self.ran), selective_region() is not None
        self.ran.append(module)
        self.selective.append(selective)
        begins = not self._ahead
        if self._as_foreseen and (at >= len(self.foreseen) or self.foreseen[at] is not module):
            # The order differs from the previous one: what was prepared may never be asked for.
            self._as_foreseen = False
            self.drop()
        if selective:
            # The region caches what the recomputation in backward runs: this module's ops only.
            self.drop()
        ready = None
        if self._ahead:
            seen, ready = self._ahead.popleft()
            if not seen.still_holds(_Seen(module)):
                ready.drop()
                ready = None
            else:
                ready.compare(module, self.unseen)
        if ready is None:
            ready = prepare(module)
        ready.start()
        if self._as_foreseen and not selective:
            self._look_ahead(at)
            if begins:
                # No other transfer is under way yet.
                self.gather_ahead()
        return ready

    def _look_ahead(self, at: int) -> None:
        """Prepare the parameters of the modules that follow the one at ``at``."""
        next_one = at + 1 + len(self._ahead)
        while len(self._ahead) < AHEAD and next_one < len(self.foreseen):
            if not all(self.open_after[at:next_one]):
                break
            module: Any = self.foreseen[next_one]
            runner = module.__dict__.get("_tp2d")
            if runner is None or not is_whole(module, runner.grid.mesh):
                break
            on_behalf = runner.grid.context.on_behalf_of(module)
            ready = on_behalf(runner.prepare, module)
            ready.on_behalf = on_behalf
            ready.remember()
            self._ahead.append((_Seen(module), ready))
            next_one += 1

    def gather_ahead(self) -> None:
        """Gather the weights that are needed next: best when no other transfer is under way."""
        waiting = [ready for _, ready in self._ahead if ready.gather is not None]
        for ready in waiting[:GATHERED_AHEAD]:
            ready.start()

    def drop(self) -> None:
        """Discard everything that was prepared ahead."""
        for _, ready in self._ahead:
            ready.drop()
        self._ahead.clear()


def prepare_parameters(
    module: nn.Module, prepare: Callable[[Any], Prepared], context: Context
) -> Prepared:
    """The prepared parameters of a module that is about to run, from ahead of time if foreseen.

    Args:
        prepare: prepares a module's parameters; the method of that name of the module's runner.
    """
    running = context.running
    if running is None or in_graph() or in_backward():
        ready = prepare(module)
        ready.start()
        return ready
    return running.take(module, prepare)


class Forward:
    """The forwards of one model: hooks that begin and end a :class:`Pass`.

    Where such models are nested the outermost one counts. A copy of a model starts with no order.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._order: list[nn.Module] = []
        self._selective: list[bool] = []
        self._crossed: list[tuple[list[nn.Module], list[nn.Module]]] = []
        self._begun: list[Pass | None] = []

    def __deepcopy__(self, memo: Any) -> Forward:
        return Forward(self.context)

    def watch(self, module: nn.Module) -> None:
        """Begin and end a pass with each forward of ``module``."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        # Not if the forward has raised, which one rank alone may do.
        module.register_forward_hook(self._tell)
        module.register_forward_hook(self._end, always_call=True)

    @eager_only
    def _begin(self, module: nn.Module, args: Any) -> None:
        context = self.context
        outer = context.running
        # A pass of this model's own that still runs was left behind by an interrupt.
        if in_backward() or (outer is not None and outer not in self._begun):
            self._begun.append(None)
            return
        context.forget()
        drop_unfinished(context)
        context.unseen.tell()
        steps = zip(self._selective[1:], self._crossed, self._order[1:], strict=True)
        open_after = [
            not selective and not _crosses_hooks(left, entered) and not _begins_unit(entered, after)
            for selective, (left, entered), after in steps
        ]
        context.running = Pass(self._order, open_after, context.unseen)
        self._begun.append(context.running)

    @eager_only
    def _tell(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let the ranks tell each other of parameters that were changed while the model ran.

        Raises:
            ValueError: on every rank, if there are any and no backward can follow.
        """
        if self._begun and self._begun[-1] is not None:
            unseen = self.context.unseen
            unseen.ask()
            if not any(map(_learns, _leaves(output))):
                unseen.tell()

    @eager_only
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._begun:
            return
        ended = self._begun.pop()
        if ended is None or ended is not self.context.running:
            return
        ended.drop()
        self.context.running = None
        self.context.forget()
        if ended.ran != self._order:
            self._order, self._crossed = ended.ran, _crossings(module, ended.ran)
        self._selective = ended.selective
        self._restore_in_backward(output)

    def _restore_in_backward(self, output: Any) -> None:
        """Let backward set the token sizes of this forward, for modules that it recomputes.

        By then another forward, of a batch of another size, may have run.
        """
        context, tokens = self.context, self.context.tokens
        if not torch.is_grad_enabled():
            return

        def restore(grads: Any) -> None:
            backward = backward_of(context)
            if not backward.of_pass:
                backward.of_pass = True
                # What runs after this backward has the tokens that were known before it.
                after = partial(setattr, context, "tokens", context.tokens)
                backward.at_end += [context.forget, after]
                context.unseen.hand_on()
            backward.settle_kept()
            if tokens is not None:
                context.tokens = tokens

        for tensor in _leaves(output):
            if _learns(tensor):
                tensor.grad_fn.register_prehook(restore)


def _leaves(output: Any) -> list[Any]:
    return [output] if isinstance(output, Tensor) else tree_leaves(output)


def _learns(x: Any) -> bool:
    """Whether a backward can begin at an output of a model."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.grad_fn is not None


def _crossings(
    root: nn.Module, order: Sequence[nn.Module]
) -> list[tuple[list[nn.Module], list[nn.Module]]]:
    """The modules left, and those entered, between each module and the one that runs next."""
    paths: dict[int, list[nn.Module]] = {}

    def visit(module: nn.Module, above: list[nn.Module]) -> None:
        if id(module) not in paths:
            paths[id(module)] = [*above, module]
            for child in module.children():
                visit(child, paths[id(module)])

    visit(root, [])
    crossings = []
    for before, after in pairwise(order):
        left, entered = paths.get(id(before), [before]), paths.get(id(after), [after])
        pairs = zip(left[:-1], entered[:-1], strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] is pair[1], pairs)))
        crossings.append((left[shared:], entered[shared:]))
    return crossings


def _crosses_hooks(left: Sequence[nn.Module], entered: Sequence[nn.Module]) -> bool:
    """Whether hooks of the user's, which may change parameters, run between two modules."""
    hooks = [*map(forward_hooks, left), *map(forward_pre_hooks, entered)]
    return any(_is_users(hook) for of_module in hooks for hook in of_module.values())


def _begins_unit(entered: Sequence[nn.Module], after: nn.Module) -> bool:
    """Whether an FSDP2 unit begins, or may begin, between two modules.

    The unit's parameters may be unsharded before it begins, by ``reshard_after_forward=False`` or
    ``unshard()``. But parameters prepared before that get their gradients only after FSDP2 has
    reduced those of the unit.
    """
    return any(
        "FSDPModule" in [kind.__name__ for kind in type(module).__mro__]
        for module in (*entered, after)
    )


def _is_users(hook: Any) -> bool:
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return not owner.startswith(("torch_tp2d.", "torch.distributed."))
