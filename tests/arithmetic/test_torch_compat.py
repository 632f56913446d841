"""What torch does not promise to keep: where we use it, that it still does what we use it for.

One test for each name of ``torch_tp2d/_torch_compat/``, so that a release of torch that takes one
away or changes it fails in the test of that name, and not somewhere in a model. Here are tensors,
operators and autograd of one process; groups, meshes and what is built on them are in
``test_torch_compat_distributed.py``.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from support.compat import Checks, Ops
from torch_tp2d._torch_compat import modules, tensors

PACKAGE = Path(tensors.__file__).parents[1]
CPU = torch.device("cpu")

CHECKS = Checks()
of = CHECKS.of


class _Named(Tensor):
    """A subclass that handles no function itself, and notes the operators that it meets."""

    met: list[str] = []
    __torch_function__ = tensors.disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.met.append(str(func))
        return torch.zeros(())


@of("make_wrapper_subclass", "disabled_torch_function_impl")
def _() -> None:
    x: Tensor = tensors.make_wrapper_subclass(
        _Named, torch.Size((2, 3)), dtype=torch.float64, device=CPU, requires_grad=True
    )
    assert isinstance(x, _Named) and x.shape == (2, 3) and x.dtype == torch.float64
    assert x.requires_grad
    _Named.met.clear()
    x.add(1)
    assert _Named.met == ["aten.add.Tensor"]


class _Counts(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        with tensors.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@of("DisableTorchFunctionSubclass")
def _() -> None:
    x = torch.ones(2).as_subclass(_Counts)
    _Counts.calls = 0
    assert torch.add(x, 1).tolist() == [2, 2]
    assert _Counts.calls == 1


@of("AutoDispatchBelowAutograd")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    with tensors.AutoDispatchBelowAutograd():
        assert torch.ops.aten.mul.Tensor(x, 2).grad_fn is None
    assert torch.ops.aten.mul.Tensor(x, 2).grad_fn is not None


@of("TorchDispatchMode", "disable_current_modes", "dispatch_modes", "is_mutable")
def _() -> None:
    assert list(tensors.dispatch_modes()) == []
    with Ops() as mode:
        assert list(tensors.dispatch_modes()) == [mode]
        x = torch.zeros(2)
        x.add_(1)
        with tensors.disable_current_modes():
            x.mul_(2)
    assert [str(op) for op in mode.seen] == ["aten.zeros.default", "aten.add_.Tensor"]
    assert [tensors.is_mutable(op) for op in mode.seen] == [False, True]


@of("vmapped")
def _() -> None:
    x, found = torch.ones(2, 3), []
    torch.vmap(lambda one: found.append(tensors.vmapped(one)) or one)(x)
    assert found[0] is x and tensors.vmapped(x) is None


@of("SELECTIVE_MODES")
def _() -> None:
    found = []

    def body(x: Tensor) -> Tensor:
        found.append([type(mode) for mode in tensors.dispatch_modes()])
        return x.sin()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    x = torch.ones(2, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert found == [[mode] for mode in tensors.SELECTIVE_MODES]


@of("active_fake_mode")
def _() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert tensors.active_fake_mode() is None
    with FakeTensorMode() as mode:
        assert tensors.active_fake_mode() is mode


@of("fake_mode")
def _() -> None:
    outside = torch.ones(2, 3)
    with tensors.fake_mode():
        made = torch.ones(4, 2) @ outside
    assert type(made) is not Tensor and made.shape == (4, 3)
    assert made.untyped_storage().nbytes() == 48


@of("NEEDS_VALUES")
def _() -> None:
    with tensors.fake_mode():
        for ask in (Tensor.nonzero, Tensor.item):
            with pytest.raises(tensors.NEEDS_VALUES):
                ask(torch.ones(1))


@of("constant_in_graphs")
def _() -> None:
    traced = []
    told = modules.constant_in_graphs(lambda: traced.append(1) or True)
    graph = torch.compile(lambda x: x + told(), backend="eager", fullgraph=True)
    assert [graph(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert traced == [1]


@of("begins_no_graph")
def _() -> None:
    traced = []

    def inner(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x + 1

    def called(x: Tensor, breaks: bool) -> Tensor:
        x = inner(x)
        if breaks:
            torch._dynamo.graph_break()
        return inner(x)

    whole = modules.begins_no_graph(called)
    for breaks in (False, True):
        graph = torch.compile(lambda x, breaks=breaks: whole(x * 2, breaks), backend="eager")
        traced.clear()
        assert graph(torch.ones(1)).item() == 4
        # Where it breaks, what is traced first is given up.
        assert traced[-2:] == [not breaks] * 2


@of("graph_pass")
def _() -> None:
    """Inductor keeps what it has compiled by what the pass says of itself: its source."""
    graph = torch.fx.Graph()
    one = modules.graph_pass(lambda graph: None if graph.placeholder("x") else None, __file__)
    one(graph)
    assert [node.name for node in graph.nodes] == ["x"]
    assert one.uuid() == modules.graph_pass(print, __file__).uuid()
    assert one.uuid() != modules.graph_pass(print, tensors.__file__).uuid()


@of("is_compiled")
def _() -> None:
    module, own = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not modules.is_compiled(module)
    own.compile()
    assert modules.is_compiled(own) and modules.is_compiled(torch.compile(module))


@of("outputs_of")
def _() -> None:
    x = torch.ones(4, requires_grad=True).exp()
    _, half = x.chunk(2)
    assert tensors.outputs_of(half.grad_fn) == [(2,), (2,)] and tensors.outputs_of(x.grad_fn) == [
        (4,)
    ]
    assert torch.equal(half.grad_fn(None, torch.ones(2)), torch.tensor([0.0, 0, 1, 1]))


@of("top_saved_tensors_default_hooks")
def _() -> None:
    x, found = torch.ones(2, requires_grad=True), []

    def looks(x: Tensor) -> Tensor:
        found.append(tensors.top_saved_tensors_default_hooks(True))
        return x.exp()

    looks(x), checkpoint(looks, x, use_reentrant=False)
    kept, by_hooks = found
    assert kept is None and by_hooks is not None


@of("nodes_made", "number_of_node")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    before, seen = tensors.nodes_made(), []
    y = x * 2
    between = tensors.nodes_made()
    y.register_hook(lambda _: seen.append(tensors.number_of_node()))
    (y + 1).sum().backward()
    assert tensors.number_of_node() is None
    assert seen == [before] and before < between < tensors.nodes_made()


@of("flops_of")
def _() -> None:
    a, b, q = torch.ones(2, 3), torch.ones(3, 5), torch.ones(1, 2, 8, 4)
    op = torch.ops.aten.mm.default
    assert tensors.flops_of(op, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    op = tensors.flash_attention_for_cpu.default
    assert tensors.flops_of(op, (q, q, q), {}, op(q, q, q)) == 2 * 2 * 8 * 8 * 4 * 2
    assert tensors.flops_of(torch.ops.aten.neg.default, (a,), {}, -a) == 0


@of("are_functorch_transforms_active")
def _() -> None:
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(tensors.are_functorch_transforms_active())
        return x.sum()

    body(torch.ones(2))
    torch.func.grad(body)(torch.ones(2))
    assert seen == [False, True]


@of("disable_dynamo")
def _() -> None:
    compiling = []

    @modules.disable_dynamo
    def inner(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x * 2) * 3

    assert torch.compile(outer, backend="eager")(torch.ones(1)).item() == 9
    assert compiling == [False]


@of("tree_leaves", "tree_map_only")
def _() -> None:
    x, y = torch.zeros(1), torch.ones(2)
    tree = [x, {"a": (y, 3)}]
    assert [id(leaf) for leaf in tensors.tree_leaves(tree)] == [id(x), id(y), id(3)]
    assert tensors.tree_map_only(Tensor, torch.numel, tree) == [1, {"a": (2, 3)}]


@of("apply_in_eager")
def _() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
            ctx.by = by
            return x * by

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * ctx.by, None

    x = torch.ones(2, requires_grad=True)
    y = tensors.apply_in_eager(Double, x, 2)
    assert type(y.grad_fn) is type(Double.apply(x, 2).grad_fn)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.full((2,), 2.0))

    left: list[Tensor] = []
    torch.func.grad(lambda z: left.append(x * z.detach()) or z.sum())(torch.ones(2))
    assert not left[0].requires_grad  # As it was wrapped by a transform that has ended.
    (grad,) = torch.autograd.grad(tensors.apply_in_eager(Double, left[0], 2).sum(), x)
    assert torch.equal(grad, torch.full((2,), 2.0))


@of("version", "versions")
def _() -> None:
    x = torch.ones(2)
    before = tensors.version(x)
    assert tensors.versions(x) == (before,)
    x[:1].mul_(2)
    assert tensors.version(x) == before + 1
    assert tensors.versions(x) == (before + 1,)
    with torch.inference_mode():
        assert tensors.versions(torch.ones(2)) == (None,)


@of("current_graph_task_id", "current_autograd_node", "at_end_of_backward")
def _() -> None:
    events: list[Any] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append((tensors.current_graph_task_id(), tensors.current_autograd_node()))
            tensors.at_end_of_backward(lambda: events.append("end"))
            return grad

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    y = Node.apply(x)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    (first, node), *between, (second, _), _, _ = events
    assert between == ["gradient", "end"] and events[-2:] == between
    assert -1 not in (first, second) and first != second and node is y.grad_fn
    assert tensors.current_graph_task_id() == -1


@of("adds_to_grad")
def _() -> None:
    answers: list[bool] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            answers.append(tensors.adds_to_grad(weight))
            return grad, grad

    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    y = Node.apply(x, weight).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True, inputs=[weight])
    assert answers == [True, True]
    y.backward(retain_graph=True, inputs=[x])
    for asked in ([x], [weight], [x, weight]):
        torch.autograd.grad(y, asked, retain_graph=True)
    assert answers[2:] == [False] * 4


@of("asked_alone")
def _() -> None:
    answers = []
    first = torch.ones(2, requires_grad=True)
    x = (first * 1).exp()
    x.register_hook(lambda grad: answers.append(tensors.asked_alone(x)))
    y = (x * 2).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True, inputs=[first])
    for asked in ([first], [first, x], [x]):
        torch.autograd.grad(y, asked, retain_graph=True)
    # Where what it was made of is asked for as well, that it is asked for is not told.
    assert answers == [False] * 4 + [True]
    straight = torch.ones(2, requires_grad=True)
    x = straight.exp()
    x.register_hook(lambda grad: answers.append(tensors.asked_alone(x)))
    torch.autograd.grad(x.sum(), [x], retain_graph=True)
    torch.autograd.grad(x.sum(), [straight])
    assert answers[5:] == [True, False]


@of("hooks_of")
def _() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert tensors.hooks_of(x) is None
    x.register_hook(lambda grad: None).remove()
    hooks = tensors.hooks_of(x)
    assert hooks == {}
    # Later ones are in the same dict.
    x.register_hook(lambda grad: None)
    assert tensors.hooks_of(x) is hooks and hooks


@of("hooked_in_backward")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not tensors.hooked_in_backward(x)
    hook = x.register_post_accumulate_grad_hook(lambda param: None)
    assert tensors.hooked_in_backward(x)
    hook.remove()
    assert not tensors.hooked_in_backward(x)


@of("unviewed")
def _() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, own: bool) -> Tensor:
            half = (x * 1)[:2]
            return tensors.unviewed(half) if own else half

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return torch.cat([grad, grad]), None

    x = torch.ones(4, requires_grad=True)
    y = Half.apply(x, True)
    y.mul_(3)
    y.sum().backward()
    assert y.tolist() == [3, 3] and x.grad is not None and x.grad.tolist() == [3] * 4
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Half.apply(x, False).mul_(3)


def _attention() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Query, key and value, the output of a causal attention, and their gradients from its sum."""
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(1, 2, 4, 8, generator=generator).double().requires_grad_() for _ in range(3)
    ]
    scores = given[0] @ given[1].mT * 0.3
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ given[2]
    return [x.detach() for x in given], out.detach(), list(torch.autograd.grad(out.sum(), given))


@of("flash_attention_for_cpu", "flash_attention_for_cpu_backward")
def _() -> None:
    given, wanted, wanted_grads = _attention()
    out, log = tensors.flash_attention_for_cpu(*given, 0.0, True, attn_mask=None, scale=0.3)
    torch.testing.assert_close(out, wanted)
    first = (given[0][:, :, 0] * given[1][:, :, 0]).sum(-1) * 0.3
    torch.testing.assert_close(log[:, :, 0], first)
    grads = tensors.flash_attention_for_cpu_backward(
        *(torch.ones_like(out), *given, out, log, 0.0, True), attn_mask=None, scale=0.3
    )
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad)


def _take(names: dict[Any, tuple[str, ...]]) -> None:
    for op, first in names.items():
        arguments = [argument.name for argument in op.default._schema.arguments]
        assert tuple(arguments[: len(first)]) == first and "scale" in arguments


@of("efficient_attention", "efficient_attention_backward")
def _() -> None:
    """Of CUDA: here that they take what we give, and how long their logarithms are."""
    query = ("query", "key", "value", "attn_bias")
    forward = (*query, "compute_log_sumexp", "dropout_p", "is_causal")
    backward = ("grad_out_", *query, "out", "logsumexp", "philox_seed", "philox_offset")
    _take(
        {
            tensors.efficient_attention: forward,
            tensors.efficient_attention_backward: (
                *(*backward, "dropout_p", "grad_input_mask", "is_causal"),
            ),
        }
    )
    x = torch.empty(2, 3, 40, 8, device="meta")
    out, log, *_ = tensors.efficient_attention(x, x, x, None, True, 0.0, True, scale=0.3)
    assert out.shape == x.shape and log.shape == (2, 3, 64)
    if not torch.cuda.is_available():
        return
    given, wanted, wanted_grads = _attention()
    given = [x.cuda().float() for x in given]
    out, log, *rest = tensors.efficient_attention(*given, None, True, 0.0, True, scale=0.3)
    torch.testing.assert_close(out.cpu().to(wanted), wanted, atol=1e-5, rtol=1e-5)
    grads = tensors.efficient_attention_backward(
        *(torch.ones_like(out), *given, None, out, log, *rest, 0.0),
        *([True, True, True, False], True),
        scale=0.3,
    )
    for grad, wanted_grad in zip(grads[:3], wanted_grads, strict=True):
        torch.testing.assert_close(grad.cpu().to(wanted_grad), wanted_grad, atol=1e-5, rtol=1e-5)


@of("flash_attention", "flash_attention_backward")
def _() -> None:
    """Of CUDA: here only that they take what we give."""
    names = {
        tensors.flash_attention: ("query", "key", "value", "dropout_p", "is_causal"),
        tensors.flash_attention_backward: ("grad_out", "query", "key", "value", "out", "logsumexp"),
    }
    _take(names)
    if not torch.cuda.is_available():
        return
    given, wanted, wanted_grads = _attention()
    given = [x.cuda().half() for x in given]
    out, log, *_ = tensors.flash_attention(*given, 0.0, True, False, scale=0.3)
    unused = torch.empty(0, dtype=torch.uint64, device="cuda")
    grads = tensors.flash_attention_backward(
        *(torch.ones_like(out), *given, out, log, None, None, 4, 4, 0.0, True, unused, unused),
        scale=0.3,
    )
    close: dict[str, Any] = {"atol": 0.02, "rtol": 0.02, "check_dtype": False}
    for ours, theirs in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **close)


@of("safe_softmax")
def _() -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    assert tensors.safe_softmax(scores, -1, torch.float32).tolist() == [[0.5, 0.5], [0, 0]]


@of("flex_attention_op")
def _() -> None:
    from torch.overrides import TorchFunctionMode

    met: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is tensors.flex_attention_op:
                met.append(next(x for x in args[4] if isinstance(x, Tensor)).shape)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, 8, 8)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 8, 8, device="cpu")
    with Mode():
        flex_attention(x, x, x, block_mask=mask)
    # What is asked of a mask is how many batches and heads it is for.
    assert met and all(shape[:2] == (2, 1) for shape in met)


@of("parameters_of", "submodules_of", "forward_pre_hooks", "forward_hooks")
def _() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert modules.parameters_of(module) == {"weight": module.weight, "bias": None}
    parent = nn.Module()
    parent.inner, parent.pruned = module, None
    parent.register_module("gone", None)
    assert modules.submodules_of(parent) == {"inner": module, "gone": None}

    def hook(*_: Any) -> None:
        raise AssertionError("taken off")

    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    for hooks in (modules.forward_pre_hooks(module), modules.forward_hooks(module)):
        assert list(hooks.values()) == [hook]
        hooks.clear()
    module(torch.ones(1, 2))


@pytest.mark.parametrize("name", CHECKS)
def test_it_does_what_it_is_for(name: str) -> None:
    CHECKS[name]()


def test_all_that_is_wrapped_is_used_and_checked() -> None:
    used = {
        alias.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and "_torch_compat." in (node.module or "")
        for alias in node.names
    }
    # No test module imports another.
    checked = {
        ast.literal_eval(name)
        for path in Path(__file__).parent.glob("test_torch_compat*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "of"
        for name in node.args
    }
    assert used == _wrapped() == checked


def _wrapped() -> set[str]:
    """What the modules define, or hand on from torch: ``from torch import _name as name``."""
    names: set[str] = set()
    paths = (PACKAGE / "_torch_compat").glob("*.py")
    for node in [node for path in paths for node in ast.parse(path.read_text()).body]:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            names.add(ast.unparse(target))
    return {name for name in names if not name.startswith("_")}
