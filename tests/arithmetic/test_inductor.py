"""The order that Inductor is given for a graph's transfers, on graphs written out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from torch_tp2d._tracing import WEIGHT
from torch_tp2d.integrations import inductor

_C10D = torch.ops._c10d_functional
ROW, COL = "row", "col"


class _Block:
    """A graph, and its order: starts with the name of what is sent, waits with a minus, products.

    What computes of a weight what is sent is not shown.
    """

    def __init__(self, weights: str) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.weights = {name: self.graph.placeholder(f"of_{name}") for name in weights}

    def gather(self, name: str, of: Node | None = None, pieces: int = 1, noted: bool = True) -> Any:
        """Start a gather of a weight, of its own or of ``of``."""
        weight = self.weights[name] if of is None else of
        flat = self.graph.call_function(torch.ops.aten.t.default, (weight,))
        starts = []
        for piece in range(pieces):
            sent = self.graph.call_function(torch.ops.aten.select.int, (flat, 0, piece))
            op = _C10D.all_gather_into_tensor.default
            starts.append(self.graph.create_node("call_function", op, (sent, 2, ROW), name=name))
            starts[-1].meta["custom"] = {WEIGHT: True} if noted else {}
        return starts

    def send(self, name: str, x: Node, op: Any = _C10D.all_reduce.default) -> Node:
        return self.graph.create_node("call_function", op, (x, "sum", COL), name=name)

    def wait(self, start: Node) -> Node:
        return self.graph.call_function(_C10D.wait_tensor.default, (start,))

    def product(self, *factors: Node) -> Node:
        return self.graph.call_function(torch.ops.aten.mm.default, factors)

    def linear(self, name: str, **options: Any) -> None:
        starts = self.gather(name, **options)
        for start in starts:
            self.x = self.product(self.x, self.wait(start))

    def done(self, *results: Node) -> str:
        self.graph.output(results)
        inductor.reorder(self.graph)
        self.graph.lint()
        seen = []
        for node in self.graph.nodes:
            if node.target is _C10D.wait_tensor.default:
                seen.append(f"-{node.args[0].name}")
            elif getattr(node.target, "namespace", "") == "_c10d_functional":
                seen.append(node.name)
            elif node.target is torch.ops.aten.mm.default:
                seen.append("x")
        return " ".join(seen)


def test_weights_are_gathered_ahead() -> None:
    """Four are on their way before the first is awaited, and one more with each."""
    block = _Block("abcdefg")
    for name in "abcdefg":
        block.linear(name)
    assert block.done(block.x) == "a b c d e -a x f -b x g -c x -d x -e x -f x -g x"


def test_a_weight_in_pieces_is_one() -> None:
    block = _Block("abcdef")
    block.linear("a", pieces=3)
    for name in "bcdef":
        block.linear(name)
    assert block.done(block.x) == (
        "a a_1 a_2 b c d e -a x -a_1 x -a_2 x f -b x -c x -d x -e x -f x"
    )


def test_the_tokens_that_meet_a_weight_go_before_the_next_weights() -> None:
    block = _Block("ab")
    (a,) = block.gather("a")
    tokens = block.send("tokens", block.x)
    block.x = block.product(block.wait(a), block.wait(tokens))
    block.linear("b")
    assert block.done(block.x) == "a tokens b -a -tokens x -b x"


def test_what_is_no_weight_stays() -> None:
    """Nor do weights that a transfer has brought move before it: fused projections' parts."""
    block = _Block("abcd")
    block.linear("a")
    block.linear("b", noted=False)
    part = block.wait(block.send("part", block.weights["c"]))
    block.linear("c", of=part)
    block.linear("d")
    assert block.done(block.x) == "a d -a x b -b x part -part c -c x -d x"


def test_sums_are_awaited_late() -> None:
    """Eight are on their way. What goes on with a transfer awaits it where it did."""
    block = _Block("")
    results = []
    for at in range(10):
        start = block.send(f"s{at}", block.product(block.x, block.x))
        moved = block.wait(start)
        results.append(block.graph.call_function(torch.ops.aten.t.default, (moved,)))
        block.x = block.product(block.x, block.x)
    needed = block.wait(block.send("needed", block.x))
    last = block.product(needed, needed)
    assert block.done(last, *results) == (
        "x s0 x x s1 x x s2 x x s3 x x s4 x x s5 x x s6 x x s7 x x -s0 s8 x x -s1 s9 x needed "
        "-needed x -s2 -s3 -s4 -s5 -s6 -s7 -s8 -s9"
    )


def test_a_sum_in_pieces_is_put_together_when_its_last_has_come() -> None:
    block = _Block("")
    pieces = [block.wait(block.send(f"s{at}", block.x)) for at in range(2)]
    whole = block.graph.call_function(torch.ops.aten.cat.default, (pieces,))
    for _ in range(2):
        block.x = block.product(block.x, block.x)
    assert block.done(whole, block.x) == "s0 s1 x x -s0 -s1"


def test_the_options_are_inductor_s() -> None:
    """``torch.compile`` refuses, before it compiles, options that it does not know."""
    torch.compile(torch.nn.Linear(2, 2), options=inductor.overlap_options())
