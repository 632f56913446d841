"""``suggest``: the schedule that is played, the arithmetic of the choice, what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed._tensor.common_dtensor import (
    FeedForward,
    ModelArgs,
    Transformer,
)

import torch_tp2d
from support import world
from support.marks import deep
from support.models import (
    DoubleTransformer,
    batch,
    loss_of,
    plan_dtensor,
    relative,
    transformer,
)
from torch_tp2d import Colwise2D, suggest
from torch_tp2d.__main__ import main
from torch_tp2d.planner import Rates, search
from torch_tp2d.planner.candidates import Candidate, Way
from torch_tp2d.planner.machine import Machine, calibrate, machine_of, read_link, read_size
from torch_tp2d.planner.simulate import simulate
from torch_tp2d.planner.step import NO_PLAN, Case, run_step
from torch_tp2d.planner.trace import Compute, Start, Wait

ONE = Machine(flops=1.0, memory_rate=1e30, link=1.0)
"""Of which a second is a unit of work, or of bytes."""
LINKS_ALONE = Machine(flops=1e30, memory_rate=1e30, link=1e6)
"""On which bytes decide."""


def _seconds(events: list[Any], machine: Machine = ONE) -> float:
    return simulate(events, machine, {"row": 2, "col": 2}).seconds


def test_work_hides_a_transfer_until_it_is_asked_for() -> None:
    travels, works = Start("row", "all_gather_into_tensor", 5), Compute(3, 0)
    assert _seconds([travels, works, Wait(0), works]) == 5 + 3
    assert _seconds([travels, works, works, Wait(0)]) == 6
    assert _seconds([travels, Wait(0), works, works]) == 5 + 6
    # The step has not ended while something travels.
    assert _seconds([works, travels]) == 3 + 5


def test_transfers_share_a_link_and_not_two() -> None:
    row, col = Start("row", "all_reduce", 5), Start("col", "all_reduce", 4)
    both = [row, col, Wait(0), Wait(1)]
    assert _seconds(both) == 9
    node = Machine(flops=1.0, memory_rate=1e30, link=1.0, near=2.0, per_node=2)
    assert _seconds(both, node) == max(5, 4 / 2)


def test_fsdp2_gathers_ahead_but_not_on_gloo() -> None:
    """One unit ahead; and gloo's reduce-scatter is as long as an all-reduce."""
    gather = Start("dp", "allgather_base", 2, of_fsdp=True)
    scatter = Start("dp", "reduce_scatter_base", 2, of_fsdp=True)
    works = Compute(3, 0)
    events = [gather, works, gather, works, scatter, works, scatter]
    gloo = Machine(flops=1.0, memory_rate=1e30, link=1.0, transport="gloo")
    assert _seconds(events) == 2 + 3 + 3 + 3 + 2
    assert _seconds(events, gloo) == 2 + 3 + 2 + 3 + 4 + 3 + 4


def test_a_product_reads_while_it_multiplies_and_sockets_take_the_processor() -> None:
    slow = Machine(flops=1.0, memory_rate=1.0, link=1.0, host_rate=0.5)
    assert _seconds([Compute(3, 2), Compute(2, 3)], slow) == 3 + 3
    # A CPU does so with what is in its caches, which is a part of the rate of products.
    assert _seconds([Compute(3, 2)], replace(slow, transport="gloo")) == 3 + 2
    # Two bytes take four seconds of the processor, and have come by then.
    travels, works = Start("row", "all_reduce", 2), Compute(3, 0)
    assert _seconds([travels, works, Wait(0)], slow) == 4 + 3
    # A rank that waits has the processor free for it, until there is work again.
    assert _seconds([travels, Wait(0), works], slow) == 2 + (4 - 2) + 3


def test_a_gpu_works_while_its_host_asks_for_more() -> None:
    """The time of a call was added to the work that it asked for, on GPUs too."""
    events = [Compute(4, 0), Compute(1, 0, ops=10), Compute(2, 0)]
    machine = Machine(flops=1.0, memory_rate=1e30, link=1.0, op_seconds=1.0)
    assert _seconds(events, machine) == 11 + 2
    assert _seconds(events, replace(machine, transport="gloo")) == 4 + 1 + 1 + 10 + 2 + 1


def test_links_are_slower_beside_work_where_ranks_share_processors() -> None:
    machine = Machine(flops=1.0, memory_rate=1e30, link=1.0, beside_work=0.5)
    short, long = (Start("row", "all_reduce", size) for size in (1, 4))
    assert _seconds([long, Compute(4, 0), Wait(0)], machine) == 4 + 2
    # The first ends during the work, after two seconds, and the second goes on.
    assert _seconds([short, long, Compute(4, 0), Wait(0), Wait(1)], machine) == 4 + 3
    assert _seconds([long, Wait(0), Compute(4, 0)], machine) == 4 + 4


def test_gloo_sends_while_ranks_wake_up() -> None:
    """A gather of one byte takes 4 ms on 4 ranks that share two processors, and one of 64 KB each
    at 200 Mbit/s only the 8 ms of its bytes. The two were added up: steps of few tokens, whose
    transfers are small, were predicted to take up to half as long again as they took.
    """
    large, small = (Start("row", "all_reduce", size) for size in (8, 2))
    machine = Machine(flops=1.0, memory_rate=1e30, link=1.0, latency=4.0)
    gloo = replace(machine, transport="gloo")
    assert _seconds([large, Wait(0)], machine) == 4 + 8
    assert _seconds([large, Wait(0)], gloo) == 8
    assert _seconds([small, Wait(0)], gloo) == 4
    # Ranks wake up once for what is queued.
    assert _seconds([large, small, Wait(0), Wait(1)], gloo) == 8 + 2
    assert _seconds([small, small, Wait(0), Wait(1)], gloo) == 4 + 2


def test_starting_a_transfer_holds_up_the_work() -> None:
    """A plan of many transfers that all hide was predicted to take no longer than one of few."""
    works, travels = Compute(3, 0), Start("row", "all_reduce", 1)
    machine = Machine(flops=1.0, memory_rate=1e30, link=1e3, host_seconds=0.5, transport="gloo")
    step = simulate([works, travels, travels, works, Wait(1), Wait(2)], machine, {"row": 2})
    assert step.seconds == step.compute == 3 + 0.5 + 0.5 + 3


def test_a_question_about_a_device_is_no_work() -> None:
    """A fake tensor's ``.device`` dispatches ``prim::device``, which was taken for reading it all.

    Of a pipelined block that was four fifths of what a step touched, and suggestions followed.
    """
    step = run_step(nn.Linear(8, 8, bias=False), Case((1, 1), Colwise2D(), 2, 4))
    work = [event for event in step.recorder.events if isinstance(event, Compute)]
    assert [(event.flops, event.touched) for event in work if event.flops] == [(1024, 768)] * 3
    assert sum(event.ops for event in work) < 12


def test_the_step_of_a_plan_that_chooses_gathers_ahead_as_it_does() -> None:
    """Under ``dataflow="auto"``, on gloo, nothing was: the recorded step was a model's first.

    Of eight ranks at 200 Mbit/s that step was predicted to take 1.3 times what it took.
    """
    rates, events = Rates(row=25e6, col=25e6, flops=2e10), []
    for options in ({}, {"algorithm": "pipelined"}):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        plan = {
            f"{at}": Colwise2D(input_layouts=(Shard(0), Shard(2)), **options) for at in range(4)
        }
        case = Case((2, 2), plan, 64, 64, transport="gloo", rates=rates)
        events.append(run_step(model, case).recorder.events)
    assert events[0] == events[1]


def _calibrated() -> Machine:
    return calibrate()


def test_ranks_measure_one_machine() -> None:
    """Each had its own figures, by which two could have suggested two plans."""
    first, second = world.run(2, _calibrated)
    assert first == second and 0 < first.latency < 1 and first.transport == "gloo"
    assert 0 < first.host_seconds < 1
    assert first.link > 1e5 and 1e5 < first.host_rate < 1e12


def test_rates_and_sizes_are_read() -> None:
    assert read_link("400gbit") == read_link("400 Gbit/s") == read_link("50GB/s") == 50e9
    assert read_link("200mbit") == 25e6 and read_link(7) == 7
    assert read_size("80GB") == 80e9 and read_size("1.5 KiB") == 1536
    for wrong in ("fast", "400", "-1GB/s", 0, "1.2.3GB/s"):
        with pytest.raises(ValueError, match="link is a rate"):
            read_link(wrong)
    with pytest.raises(ValueError, match="memory is a size"):
        read_size("much")


def test_nodes_and_transport_of_any_machine() -> None:
    """They were ignored beside a Machine, and within nodes of this machine transfers were free.

    Only a device of the table was given them; of this machine the rate within a node stayed
    infinite, its default.
    """
    node = replace(ONE, near=2.0)
    machine, _ = machine_of(node, 4, 8, "gloo", torch.float32)
    assert machine == replace(node, link=4.0, per_node=8, transport="gloo")
    assert machine.rate(8) == ("near", 2.0) and machine.rate(9) == ("link", 4.0)
    assert machine_of(None, 4, None, "nccl", torch.float32)[0].transport == "nccl"
    for device in (None, ONE):
        with pytest.raises(ValueError, match=r"per_node=8 says .* near="):
            machine_of(device, 4, 8, None, torch.float32)
    assert machine_of("h100", 4, 8, None, torch.bfloat16)[0].rate(8) == ("near", 0.8 * 450e9)


HIDDEN = 64


def _model(seq: int, layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        model = transformer(8, n_layers=layers, dim=HIDDEN, n_heads=4, max_seq_len=seq)
    return model.float()


def _plan(model: nn.Module, mesh: Any) -> dict[str, Any]:
    return plan_dtensor()


@pytest.mark.parametrize(
    "m,wins", [deep(0.5, {(1, 4)}), deep(3, {(2, 2), (2, 1, 2)}), deep(32, {(4, 1, 1)})]
)
def test_tokens_per_weight_decide(m: float, wins: set[tuple[int, ...]]) -> None:
    """Elements for a block, in hidden^2, weights kept: 6m on a line, 18 by FSDP2, 2m + 6 on 2 x 2.

    It says so where stock plans win.
    """
    size = 4 if m < 32 else 16
    seq = int(m * HIDDEN) // size
    found = suggest(_model(seq), 4, batch=size, seq=seq, plan=_plan, device=LINKS_ALONE)
    assert found.best.mesh_shape in wins, str(found)
    if m == 32:
        assert found.plan is None and found.best.name == "FSDP2 4"
    times = [each.seconds for each in found.candidates]
    assert times == sorted(times) and len({each.name for each in found.candidates}) >= 6


@pytest.mark.deep
def test_layers_are_told_from_few() -> None:
    """What is predicted from few layers of five is what five of them do."""
    sizes = {"batch": 4, "seq": 16, "plan": _plan, "device": LINKS_ALONE}
    found = {each.name: each for each in suggest(_model(16, 5), 2, **sizes).candidates}
    model = _model(16, 5)
    for name in ("TP 2", "2-D 2x1"):
        whole = torch_tp2d.describe(
            model, found[name].mesh_shape, found[name].plan, batch=4, seq=16
        )
        assert found[name].bytes == whole.total_bytes
        assert found[name].memory.parameters == whole.memory.parameters
        assert abs(found[name].memory.peak / whole.memory.peak - 1) < 0.02


class _TwoLists(DoubleTransformer):
    """Two lists of equal layers that cost differently, as an encoder and a decoder do."""

    def __init__(self, wide: int, narrow: int) -> None:
        args = {"vocab_size": 8, "dim": HIDDEN, "n_heads": 4, "max_seq_len": 16, "dropout_p": 0.0}
        super().__init__(ModelArgs(n_layers=wide, **args))
        self.more = Transformer(ModelArgs(n_layers=narrow, **args)).layers
        for layer in self.more:
            layer.feed_forward = FeedForward(HIDDEN, HIDDEN // 2, 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in (*self.layers, *self.more):
            h = layer(h)
        return self.output(self.norm(h))


def _plan_of_lists(model: nn.Module, mesh: Any) -> dict[str, Any]:
    plan = plan_dtensor()
    more = {name.replace("layers.", "more."): plan[name] for name in plan if "layers." in name}
    return plan | copy.deepcopy(more)


@pytest.mark.parametrize(
    "wide,narrow,way",
    [
        deep(6, 5, Way("TP", (1, 1, 2), "auto")),
        *(deep(12, 6, Way("2-D", (1, 2, 1), "auto", keep=keep)) for keep in (True, False)),
        *(deep(12, 4, Way("FSDP2", (2, 1, 1), keep=keep)) for keep in (True, False)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_layers_of_lists_of_different_lengths(
    wide: int, narrow: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 layers and 6 it told the parameters, bytes, time and memory of 12 and 12.

    Nine more were added of each list, since the length of the longest stood for all.
    """
    model, machine = _TwoLists(wide, narrow), Machine(flops=1e9, memory_rate=1e9, link=1e7)

    def told() -> Candidate:
        case = Case(None, _plan_of_lists, 4, 16)
        return search.Search(model, case, machine, None, "adamw").predict(way)

    few = told()
    plan = NO_PLAN if few.plan is None else few.plan
    whole = torch_tp2d.describe(
        model, way.mesh_shape, plan, batch=4, seq=16, reshard_after_forward=not way.keep
    )
    assert few.memory.parameters == whole.memory.parameters
    assert few.bytes == whole.total_bytes
    assert abs(few.memory.peak / whole.memory.peak - 1) < 0.02
    monkeypatch.setattr(search, "FEW", 100)  # All layers are run.
    assert abs(few.seconds / told().seconds - 1) < 0.01


@pytest.mark.deep
def test_copies_of_weights_where_links_between_nodes_are_slow() -> None:
    """HSDP: FSDP2 within a node, gradients summed over nodes; and what is told is what it does."""
    nodes = replace(LINKS_ALONE, link=1e5, near=1e7, per_node=2)
    sizes = {"batch": 4, "seq": 16}
    found = suggest(_model(16), 4, plan=_plan, device=nodes, **sizes)
    chosen = {(each.name, each.keep_weights): each for each in found.candidates}
    hybrid, plain = (chosen[name, False] for name in ("HSDP 2x2", "FSDP2 4"))
    assert hybrid.mesh_shape == (2, 2, 1, 1) and hybrid.seconds < plain.seconds
    assert hybrid.memory.parameters == 2 * plain.memory.parameters
    whole = torch_tp2d.describe(_model(16), (2, 2, 1, 1), NO_PLAN, **sizes)
    assert (hybrid.bytes, hybrid.memory.peak) == (whole.total_bytes, whole.memory.peak)
    assert Way("2-D", (4, 2, 2), replicate=2).name == "HSDP 2x2 x 2-D 2x2"
    assert Way("2-D", (4, 2, 2), replicate=2).mesh_shape == (2, 2, 2, 2)


@pytest.mark.deep
def test_of_very_many_meshes_those_that_move_least_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the others only if none of those fits."""
    sizes = {"batch": 4, "seq": 16, "plan": _plan, "device": LINKS_ALONE}
    every = suggest(_model(16), 4, **sizes)
    monkeypatch.setattr(search, "AT_ONCE", 4)
    few = suggest(_model(16), 4, **sizes)
    assert few.best.name == every.best.name and len(few.candidates) < len(every.candidates)
    assert any("others" in name for name in few.refused) and "others: by arithmetic" in str(few)
    least = min(every.candidates, key=lambda each: each.memory.peak)
    tight = suggest(_model(16), 4, memory=least.memory.peak, **sizes)
    assert tight.best.memory.peak <= least.memory.peak


def test_a_way_that_cannot_be_run_ends_no_search() -> None:
    """A TypeError of one candidate's style ended it; and a way that ran was listed as not run.

    Only other errors were caught. What could not be run was known by its name alone, which its
    variant of another algorithm has, too.
    """

    def plan(model: nn.Module, mesh: Any) -> dict[str, Any]:
        if mesh.shape == (1, 2):
            raise TypeError("no style for this")
        return plan_dtensor()

    class Keeps(search.Search):
        def predict(self, way: Way) -> Candidate:
            if not way.keep:
                raise ValueError("it has to keep them")
            return super().predict(way)

    given = Case(None, plan, 4, 16), LINKS_ALONE, None, "adamw"
    tried = Keeps(_model(16), *given)
    names = {each.name for each in tried.run(2)}
    assert names == {"FSDP2 2", "2-D 2x1"}
    assert tried.refused == {
        "TP 2 (auto)": "no style for this",
        "2-D 1x2 (auto)": "no style for this",
        "FSDP2 2 (weights gathered again)": "it has to keep them",
        "2-D 2x1 (auto, weights gathered again)": "it has to keep them",
    }


@pytest.mark.deep
def test_micro_batches_gather_weights_once() -> None:
    """Or each, in less memory; what is told of five is what five do, as of three."""
    sizes = {"batch": 20, "seq": 16, "plan": _plan}
    found = suggest(_model(16), 2, device=LINKS_ALONE, micro_batches=5, **sizes)
    assert "in 5 micro-batches" in str(found) and "kept, reduced once" in str(found)
    chosen = {(c.name, c.keep_weights, c.reduce_each): c for c in found.candidates}
    for name, shape in {"FSDP2 2": (2, 1, 1), "2-D 2x1": (2, 1)}.items():
        kept, each = chosen[name, True, False], chosen[name, False, True]
        assert each.bytes > 2 * kept.bytes and each.memory.peak < kept.memory.peak
        whole = torch_tp2d.describe(
            _model(16),
            shape,
            NO_PLAN if kept.plan is None else kept.plan,
            batch=20,
            seq=16,
            micro_batches=5,
            reshard_after_forward=False,
        )
        assert kept.bytes == whole.total_bytes
    assert chosen["FSDP2 2", False, False].bytes < chosen["FSDP2 2", False, True].bytes


@pytest.mark.deep
def test_memory_rules_out_and_it_says_what_would_fit() -> None:
    sizes = {"batch": 16, "seq": 16, "plan": _plan, "device": LINKS_ALONE}
    free = suggest(_model(16), 2, **sizes)
    least = min(each.memory.peak for each in free.candidates)
    assert free.best.memory.peak > least
    tight = suggest(_model(16), 2, memory=least, **sizes)
    assert tight.best.memory.peak <= least
    assert [each.fits for each in tight.candidates].count(False) > 0
    assert tight.best.name in str(tight) and "too large" in str(tight)
    assert "<table>" in tight._repr_html_()
    read = json.loads(json.dumps(tight.to_dict()))
    assert read["candidates"][0]["name"] == tight.best.name
    assert "near" not in read["machine"] and read["machine"]["link"] == 1e6
    with pytest.raises(
        ValueError, match="nothing fits in 1000 B: the least is .* for .*more devices"
    ):
        suggest(_model(16), 2, memory=1000, **sizes)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no devices": ({"world_size": 0}, ValueError, "world_size is a number"),
    "a misspelt transport": ({"transport": "ncll"}, ValueError, '"nccl" or "gloo", not \'ncll\''),
    "nodes of fewer than none": ({"per_node": -3}, ValueError, "per_node is a number, at least 1"),
    "a node of nothing": ({"device": "h100", "per_node": 0}, ValueError, "per_node is a number"),
    "a device of no table": ({"device": "tpu"}, ValueError, "'h100'"),
    "no link": ({"device": None}, ValueError, 'say link="400gbit"'),
    "too many devices": (
        {"world_size": 67, "batch": 3},
        ValueError,
        r"dp has to divide the batch.*\[1, 3\] devices",
    ),
    "too many, of micro-batches": (
        {"world_size": 67, "batch": 6, "micro_batches": 2},
        ValueError,
        r"in 2 micro-batches: dp has to divide the batch.*\[1, 3\] devices",
    ),
    "micro-batches that do not divide": (
        {"micro_batches": 3},
        ValueError,
        "a batch of 4 does not divide into 3 micro-batches",
    ),
}


@pytest.mark.parametrize("given,error,said", BAD.values(), ids=BAD)
def test_what_cannot_be_suggested(given: Any, error: type[Exception], said: str) -> None:
    """A misspelt transport changed the answer in silence, and -3 devices of a node were taken.

    Neither was looked at, so that one was no gloo, and the other no node.
    """
    wanted = {"world_size": 2, "batch": 4, "seq": 16, "plan": _plan, "device": LINKS_ALONE}
    wanted |= given
    with pytest.raises(error, match=said):
        suggest(_model(16), wanted.pop("world_size"), **wanted)


def test_a_model_without_a_plan() -> None:
    with pytest.raises(ValueError, match="has no ready plan"):
        suggest(nn.Linear(4, 4), 2, batch=4, seq=16, device=LINKS_ALONE)


def test_a_model_without_anything_to_train() -> None:
    """It was a bare StopIteration, of the search for a floating-point parameter."""
    whole = nn.Linear(4, 4)
    for name in ("weight", "bias"):
        value = torch.zeros_like(getattr(whole, name), dtype=torch.int8)
        setattr(whole, name, nn.Parameter(value, requires_grad=False))
    for model in (nn.ReLU(), nn.Sequential(whole)):
        for plan in (_plan, None):
            with pytest.raises(ValueError, match="no floating-point parameters"):
                suggest(model, 2, batch=4, seq=16, plan=plan, device=LINKS_ALONE)


def _trains() -> list[float]:
    """Each candidate applied to real ranks, FSDP2 alone and around a grid among them."""
    reference = transformer(8, n_heads=4)
    sizes = {"batch": 4, "seq": 8, "plan": _plan, "device": LINKS_ALONE}
    found = suggest(reference, 4, **sizes)
    ids, target = batch(4, 8, 8)
    wanted = loss_of(reference(ids), target).detach()
    differ = []
    chosen = {each.mesh_shape: each for each in found.candidates if len(each.mesh_shape) == 2}
    for each in chosen.values():
        model = copy.deepcopy(reference)
        each.apply(model, each.make_mesh("cpu"))
        differ.append(relative(loss_of(model(ids), target).detach(), wanted))
    for each in (each for each in found.candidates if each.mesh_shape in ((4, 1, 1), (2, 2, 1))):
        model = copy.deepcopy(reference)
        mesh = each.make_mesh("cpu")
        each.apply(model, mesh)
        part = 4 // each.mesh_shape[0]
        mine = slice(mesh["dp"].get_local_rank() * part, (mesh["dp"].get_local_rank() + 1) * part)
        loss = loss_of(model(ids[mine]), target[mine])
        alone = loss_of(reference(ids[mine]), target[mine]).detach()
        differ.append(relative(loss.detach(), alone))
    return differ


@pytest.mark.deep
def test_what_is_suggested_runs() -> None:
    for differ in world.run(4, _trains):
        assert len(differ) >= 5 and max(differ) < 1e-11


def _command(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*words])
    return status, out.getvalue(), err.getvalue()


def make_model() -> nn.Module:
    """For the command line."""
    return _model(16)


def make_plan(model: nn.Module, mesh: Any) -> dict[str, Any]:
    """For the command line."""
    return plan_dtensor()


def test_the_command_line() -> None:
    of_model = (f"{__name__}:make_model", "--plan", f"{__name__}:make_plan")
    sizes = ("--batch", "4", "--seq", "16")
    status, out, _ = _command("describe", *of_model, "--mesh", "2x2", *sizes, "--json")
    assert status == 0 and json.loads(out)["mesh"] == {"tp_row": 2, "tp_col": 2}
    wanted = torch_tp2d.describe(make_model(), (2, 2), make_plan, batch=4, seq=16)
    assert json.loads(out)["total"]["bytes"] == wanted.total_bytes
    link = ("--device", "h100", "--link", "400gbit")
    status, out, _ = _command("suggest", *of_model, "--devices", "2", *sizes, *link)
    assert status == 0 and "FSDP2 2" in out and "TP 2" in out
    status, out, _ = _command("calibrate", "--link", "200mbit", "--json")
    assert status == 0 and json.loads(out)["link"] == 25e6 and json.loads(out)["flops"] > 1e8
    for words, said in {
        ("describe", "tests:nothing", "--mesh", "2x2", *sizes): "tests:nothing",
        ("describe", "torch.nn:Identity", "--mesh", "2x2", *sizes): "has no ready plan",
        ("calibrate",): 'say link="400gbit"',
        ("describe", *of_model, "--mesh", "2x2", *sizes, "--dtype", "int4x"): "--dtype is",
    }.items():
        status, out, err = _command(*words)
        assert status == 2 and said in err and out == ""


@pytest.mark.deep
def test_a_config_of_transformers_is_a_model(tmp_path: Path) -> None:
    """A file not called ``config.json`` was refused: its folder was looked into for one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    alone = tmp_path / "alone" / "tiny.json"
    alone.parent.mkdir()
    alone.write_text((tmp_path / "config.json").read_text())
    sizes = ("--batch", "4", "--seq", "16")
    for name in (tmp_path, tmp_path / "config.json", alone):
        status, out, err = _command("describe", str(name), "--mesh", "2x2", *sizes)
        assert status == 0 and "transformer.h.0.mlp.c_fc" in out, err
    status, _, err = _command("describe", str(tmp_path / "none"), "--mesh", "2x2", *sizes)
    assert status == 2 and "package.module:function" in err
    for text in ("[1]", "{}", "no JSON"):
        alone.write_text(text)
        status, _, err = _command("describe", str(alone), "--mesh", "2x2", *sizes)
        assert status == 2 and "package.module:function" in err, text


@pytest.mark.deep
def test_recomputation_is_tried_where_nothing_else_fits() -> None:
    sizes = {"batch": 16, "seq": 16, "plan": _plan, "device": LINKS_ALONE}
    least = min(each.memory.peak for each in suggest(_model(16), 2, **sizes).candidates)
    found = suggest(_model(16), 2, memory=0.9 * least, **sizes)
    assert found.best.recompute and "recomputing" in str(found)
    assert found.best.memory.peak <= 0.9 * least
