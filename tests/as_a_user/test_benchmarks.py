"""The benchmark's arithmetic and bookkeeping. What it measures is not tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare
import convergence
import gpu
import hf_speed
import hf_step
import measure
import pair
import paper
import plot
import traffic
import validate
from variants import STOCK_PLANS, Share, Sizes, build

SIZES = Sizes(layers=2, hidden=512, heads=8, batch=8, seq=512)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class TestPredictedBytes:
    @pytest.mark.parametrize(
        "plan, share, megabytes",
        [
            ("tp", Share(1, 4), 151.0),
            ("tp-input", Share(1, 4), 100.7),
            ("tp-sp", Share(1, 4, True), 100.7),
            ("fsdp", Share(4, 1), 56.6),
            ("fsdp-kept", Share(4, 1), 37.75),
            ("fsdp-tp", Share(2, 2), 52.4),
            ("fsdp-sp-kept", Share(2, 2, True), 46.1),
            ("tp2d", Share(2, 2, True), 46.1),
        ],
    )
    def test_of_the_block(self, plan: str, share: Share, megabytes: float) -> None:
        predicted = traffic.predicted_bytes(plan, share, SIZES)
        assert predicted == pytest.approx(megabytes * 1e6, rel=1e-3)

    def test_a_grid_contains_a_line_of_tp_sp_and_fsdp(self) -> None:
        """FSDP gathers its weights twice, a grid keeps them for backward by default."""
        for share, plan, ratio in ((Share(1, 4), "tp-sp", 1), (Share(4, 1), "fsdp", 2 / 3)):
            grid = traffic.predicted_bytes("tp2d", share, SIZES)
            other = traffic.predicted_bytes(plan, share, SIZES)
            assert other is not None and grid == pytest.approx(other * ratio)

    @pytest.mark.usefixtures("four_ranks")
    def test_is_what_the_collectives_of_each_plan_add_up_to(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As the benchmarks run: on other backends a grid gathers its weights again.
        monkeypatch.setenv("TP2D_TRANSPORT", "gloo")
        small = Sizes(layers=1, hidden=256, heads=8, batch=4, seq=64)
        names = [name for name in STOCK_PLANS if name != "cp-tp"] + ["tp2d"]
        # An efficient reduce-scatter makes a gloo group, which a fake world cannot connect.
        variants, refused = build(names, [(2, 2)], small)
        assert not refused
        for variant in variants:
            if variant.efficient:
                continue
            with traffic.WireCounter() as counter:
                variant.step(small.elements)
            name = variant.name.partition(" ")[0]
            predicted = traffic.predicted_bytes(name, variant.share, small)
            assert counter.total_bytes == pytest.approx(predicted, rel=0.02), name


def test_the_headline_is_against_the_best_stock_plan_and_the_best_in_no_more_memory() -> None:
    """Against plain TP, which a careful user would not run, a ratio says little."""

    def record(plan: str, seconds: list[float], peak: float, efficient: bool = False) -> Any:
        return {
            "plan": plan,
            "efficient_reduce_scatter": efficient,
            "seconds": sorted(seconds)[1],
            "step_peak_bytes": peak,
            "rounds": {"seconds": seconds, "stolen": [0.0] * 3},
        }

    records = [
        record("tp", [9.0, 9.0, 9.0], 50.0),
        record("fsdp-tp-kept 2x2", [3.0, 3.6, 3.0], 200.0),
        record("fsdp-kept", [2.5, 2.4, 2.5], 200.0, efficient=True),
        record("tp2d 2x2", [2.0, 2.0, 2.0], 100.0),
        record("tp2d 4x1", [4.0, 4.0, 4.0], 100.0),
        record("tp2d:summa 2x2", [1.0, 1.0, 1.0], 100.0),
    ]
    lines = measure.headlines(records)
    assert lines["best stock as it is"] == ("tp2d 2x2", "fsdp-tp-kept 2x2", 1.5, 1.5, 1.8)
    assert lines["best stock as it is, in no more memory"].stock == "tp"
    assert lines["best stock with an efficient reduce-scatter"].stock == "fsdp-kept +rs"
    assert measure.headlines(records[:3]) == {}


@pytest.mark.usefixtures("four_ranks")
def test_sizes_that_do_not_split_are_reasons_not_omissions() -> None:
    small = Sizes(layers=1, hidden=24, heads=3, batch=2, seq=4)
    variants, refused = build(["tp", "fsdp", "tp2d:bmr"], [(4, 1)], small)
    assert not variants
    assert refused["tp"] == "3 heads do not split over 4 ranks"
    assert refused["fsdp"] == "a batch of 2 does not split over 4 ranks"
    assert "square" in refused["tp2d:bmr 4x1"]


def test_bytes_per_second() -> None:
    assert measure.bytes_per_second("200mbit") == 25e6
    assert measure.bytes_per_second("1gbit") == 125e6
    assert math.isinf(measure.bytes_per_second("none"))
    with pytest.raises(ValueError, match="write it as in"):
        measure.bytes_per_second("fast")


@pytest.mark.usefixtures("four_ranks")
def test_a_step_that_the_host_disturbed_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to twice, and the least disturbed counts; a quiet one is taken once."""
    shares = iter([0.5, 0.01, 0.0, 0.5, 0.4, 0.6])
    monkeypatch.setattr(
        measure,
        "timed_step",
        lambda variant, *_: measure.Cost(share := next(shares), 1 + share, 7),
    )
    small = Sizes(layers=1, hidden=16, heads=4, batch=4, seq=4)
    (variant,), _ = build(["tp"], [(4, 1)], small)
    measure.measure([variant], 3, small.elements)
    assert variant.seconds == [1.01, 1.0, 1.4]
    assert variant.stolen == [0.01, 0.0, 0.4] and variant.again == 3 and variant.sent == [7] * 3
    assert measure.undisturbed(variant.seconds, variant.stolen) == [1.01, 1.0]
    assert measure.undisturbed([1.0, 2.0], [0.5, 0.4]) == [1.0, 2.0]
    assert measure.undisturbed([1.0, 2.0], [0.0, 0.0], [0.5, 0.0]) == [2.0]


class TestResults:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "results" / "all.json"
        results = compare.load(path)
        case = compare.all_cases()["8ranks-1gbit"]
        wanted = compare.settings(case, ["tp", "tp2d"], 5, "gloo")
        results["cases"][case.name] = {"settings": wanted}
        compare.save(results, path)
        found = compare.load(path)
        assert found == results
        done = found["cases"][case.name]
        assert compare.is_done(done, wanted)
        assert not compare.is_done(done, compare.settings(case, ["tp"], 5, "gloo"))
        assert not compare.is_done(done | {"failed": "exit status 1"}, wanted)
        assert not compare.is_done(None, wanted)

    def test_of_another_machine_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "all.json"
        results = compare.load(path)
        compare.save(results | {"machine": {"cpu": "another"}}, path)
        with pytest.raises(SystemExit, match="another machine"):
            compare.load(path)

    @pytest.mark.parametrize(
        "statuses, runs, failed", [([0], 1, False), ([139, 0], 2, False), ([1], 1, True)]
    )
    def test_a_killed_case_runs_once_more(
        self, statuses: list[int], runs: int, failed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = list(statuses)

        def run(arguments: list[str], env: dict[str, str]) -> int:
            Path(arguments[-1]).write_text('{"plans": []}')
            return left.pop(0)

        monkeypatch.setattr(compare, "run_to_its_end", run)
        case = compare.all_cases()["4ranks-1gbit"]
        result = compare.run_case(case, ["tp"], 1, "gloo")
        assert not left
        assert len(result["notes"]) == runs - 1
        assert ("failed" in result) == failed
        assert ("plans" in result) != failed

    def test_cases_are_chosen_by_pattern(self) -> None:
        names = [case.name for case in compare.chosen(["m*", "4ranks-1gbit"], quick=False)]
        assert names == ["4ranks-1gbit", "m0.5", "m1", "m2", "m4", "m16", "m32"]
        with pytest.raises(SystemExit, match="no case"):
            compare.chosen(["m3"], quick=False)

    def test_every_case_that_the_names_promise(self) -> None:
        for name, case in compare.all_cases().items():
            if name.startswith("m"):
                assert case.batch * case.seq == float(name[1:]) * case.hidden

    def test_panels(self) -> None:
        def panels(*names: str) -> list[tuple[str, str, list[float]]]:
            everything: dict[str, Any] = compare.all_cases()
            cases = [vars(everything[name]) for name in names]
            return [(t, axis, [at for at, _ in group]) for t, axis, group in plot.panels(cases)]

        rates = "4 ranks, m = 8", "link rate, Mbit/s", [200.0, 1000.0, plot.UNSHAPED_MBIT]
        places = "4 ranks, links of 200mbit", "m = tokens / hidden", [0.5, 8.0]
        found = panels("4ranks-unshaped", "4ranks-1gbit", "4ranks-200mbit", "m0.5")
        assert found == [rates, places]
        assert panels("4ranks-1gbit", "8ranks-200mbit") == []


class TestHuggingFace:
    def test_how_far_curves_stray(self) -> None:
        """The first difference is told apart from the largest, which rounding grows into."""
        curves = {"one device": [4.0, 2.0], "reversed": [4.0, 2.002], "grid": [4.0004, 1.998]}
        found = convergence.summary(curves)
        assert found["largest_relative_difference"] == pytest.approx(
            {"reversed": 1e-3, "grid": 1e-3}
        )
        assert found["first_relative_difference"] == pytest.approx(1e-4)
        assert found["perplexity"]["one device"] == pytest.approx(math.exp(3.0))

    def test_sizes_that_stock_styles_cannot_split_are_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Two heads of 64 go on two columns, but not on a line of four ranks beside them."""
        with pytest.raises(SystemExit):
            hf_speed.parse(["--out", "x.json", "--hidden", "128"])
        assert "2 heads of 64" in capsys.readouterr().err

    def test_the_table_says_what_failed(self) -> None:
        record = {
            "seconds": 1.5,
            "times_ours": 2.0,
            "times_ours_min": 1.8,
            "times_ours_max": 2.2,
            "sent_bytes": None,
            "nccl_bytes": 3e6,
            "step_peak_bytes": 4e6,
        }
        plans = [{"plan": "tp-input", **record}, {"plan": "tp2d", **record}]
        lines = hf_speed.table({"gpt2": {"plans": plans}, "t5": {"failed": "exit status 1"}})
        assert "2.00 (1.80..2.20)" in lines and "1.84" in lines
        assert lines.endswith("exit status 1")

    def test_a_suggestion_is_held_against_the_fastest(self) -> None:
        record = {"times_ours": 1.0, "times_ours_min": 1.0, "times_ours_max": 1.0}
        record |= {"sent_bytes": None, "nccl_bytes": 3e6, "step_peak_bytes": 4e6}
        plans = [
            {"plan": "fsdp-kept", "seconds": 3.0, **record},
            {"plan": "tp2d 2x2", "seconds": 2.0, **record},
        ]
        suggested = {"plan": "fsdp-kept", "predicted_seconds": 2.5}
        lines = hf_speed.table({"gpt2": {"plans": plans, "suggested": suggested}})
        assert "suggest takes fsdp-kept, 1.50 of the fastest's time" in lines

    @pytest.mark.parametrize(
        "name,mesh,stock,kept,wanted",
        [
            ("FSDP2 4", (4, 1, 1), True, True, "fsdp-kept"),
            ("TP 4", (1, 4), True, True, "tp-input"),
            ("FSDP2 2 x TP 2", (2, 1, 2), True, False, "fsdp-tp 2x2"),
            ("2-D 4x1", (4, 1), False, True, "tp2d-kept 4x1"),
            ("2-D 1x4", (1, 4), False, True, "tp2d 1x4"),
            # Not among what is timed.
            ("TP+SP 4", (1, 4), True, True, ""),
            ("HSDP 2x2", (2, 2, 1, 1), True, True, ""),
            ("FSDP2 2 x 2-D 1x2", (2, 1, 2), False, True, ""),
        ],
    )
    def test_what_is_suggested_has_a_name_there(
        self, name: str, mesh: tuple[int, ...], stock: bool, kept: bool, wanted: str
    ) -> None:
        given = {"name": name, "mesh_shape": mesh, "stock": stock, "keep_weights": kept}
        assert hf_step.plan_of(SimpleNamespace(algorithm="pipelined", **given)) == wanted


class TestThePapersTables:
    def test_what_is_shown(self) -> None:
        """The paper's cells beside predicted ones, times as parts of TP's on as many devices."""
        row = {"devices": 4, "fits": True, "recomputes": False, "waiting": 0.1}
        report = {
            "device": "rtx4090",
            "torch": "2.13.0",
            "table 2": [
                {"paper": "DP=4", "devices": 4, "plan": "DP 4", "peak_bytes": 3 * 2**34},
                {**row, "paper": "TP=4", "GB": 21.5, "hours": 118, "plan": "TP 4"}
                | {"seconds": 8.0, "peak_bytes": 2**34},
                {**row, "paper": "TP2D=4", "GB": 19.8, "hours": 64, "plan": "2-D 2x2"}
                | {"seconds": 4.0, "peak_bytes": 2**33, "recomputes": True},
                {**row, "paper": "", "plan": "FSDP2 4", "seconds": 3.0, "peak_bytes": 2**33},
            ],
        }
        shown = paper.show(report)
        assert "| 4 | DP=4 | out of memory | | DP 4, too large | 48.0 | |" in shown
        assert "| 4 | TP2D=4 | 19.8 | 0.54 | 2-D 2x2, recomputing | 8.0 | 0.50 |" in shown
        assert "| 4 | the fastest of all | |  | FSDP2 4 | 8.0 | 0.38 |" in shown

    @pytest.mark.deep
    def test_a_table_is_predicted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paper, "LARGE", (2, 64, 4))
        assert paper.main(["--out", str(tmp_path / "paper.json"), "--table", "1"]) == 0
        parts = json.loads((tmp_path / "paper.json").read_text())["table 1"]
        assert parts["2-D 2x2"]["parameters"] == pytest.approx(0.25, rel=0.05)
        assert parts["2-D 2x2"]["activations"] < parts["TP 4"]["activations"]

    @pytest.mark.deep
    def test_scaling_is_predicted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a batch that grows with the devices, and of one that does not."""
        for name, value in {"HUGE": (5, 64, 4), "STRONG_BATCH": 16, "WEAK_BATCH": 2}.items():
            monkeypatch.setattr(paper, name, value)
        strong, weak = paper.scaling([16])
        assert (strong["kind"], strong["batch"]) == ("strong", 16)
        assert (weak["kind"], weak["batch"]) == ("weak", 32)
        assert strong["square"]["plan"] == "2-D 4x4" and strong["square"]["recomputes"]
        for row in (strong, weak):
            best = max(row[kind]["sequences"] for kind in ("stock", "2-D", "square"))
            assert best > 0 and row["2-D"]["sequences"] > 0
        shown = paper.show({"device": "h100", "torch": "", "scaling": [strong, weak]})
        assert "| 16 | 16 |" in shown and "| 16 | 32 |" in shown


class TestValidation:
    def test_predicted_beside_measured(self) -> None:
        """With links alone seconds are bytes; a plan that takes as long as predicted is 0 off."""
        plans = ("tp-input", 12.0), ("fsdp-kept", 6.0), ("tp2d:collective 2x2", 4.0)
        record = {"efficient_reduce_scatter": False}
        case = {
            **{"ranks": 4, "layers": 1, "hidden": 64, "heads": 4, "batch": 4, "seq": 16},
            "calibrated": {"flops": 1e30, "memory_rate": 1e30, "link": 1e4, "transport": "gloo"},
            "plans": [{**record, "plan": name, "seconds": took} for name, took in plans],
        }
        found = {each.name: each for each in validate.validate(case)}
        # Of a block's 12 h^2 weights FSDP gathers each rank 3/4, and gloo's reduce-scatter is two.
        assert found["fsdp-kept"].predicted == pytest.approx(3 * 0.75 * 12 * 64**2 * 4e-4, rel=0.03)
        # Four all-reduces of [4, 16, h].
        assert found["tp-input"].predicted == pytest.approx(4 * 1.5 * 64 * 64 * 4e-4, rel=0.01)
        said = validate.report({"small": [*found.values()]})
        assert "within 15%" in said and "the fastest's time (tp2d:collective 2x2)" in said


class TestOnGpus:
    def test_time_that_nothing_hides(self) -> None:
        spans = gpu.merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
        assert spans == [(0.0, 3.0), (5.0, 6.0)]
        assert gpu.common(spans, [(2.0, 5.5)]) == pytest.approx(1.5)

    @pytest.mark.deep
    def test_the_script_on_processes_without_a_gpu(self, tmp_path: Path) -> None:
        """Nobody could run it where it is for: here at least it reaches its end."""
        root, out = Path(__file__).resolve().parents[2], tmp_path / "gpu.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        sizes = "--hidden 32 --heads 4 --seq 16 --batch 4 --layers 1".split()
        command = [*torchrun, "--nproc-per-node=2", "benchmarks/gpu.py", f"--out={out}", *sizes]
        subprocess.run(command, check=True, cwd=root, timeout=300)
        report = json.loads(out.read_text())
        assert set(report["parity"]) == {"1x2", "2x1"}
        assert {"tp2d 1x2", "tp2d 2x1", "tp-sp", "fsdp-kept"} <= set(report["seconds"])


@pytest.mark.deep
def test_compiled_blocks_whose_sizes_no_graph_knows() -> None:
    """Without an embedding torch compiles what it can of a block. A hook that was a graph by itself
    handed on a tensor in the layout (Shard(0), None), as by Inductor None is handed on for a
    placement that is made in a graph: "'NoneType' object has no attribute 'is_replicate'".
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    sizes = ["--hidden=64", "--heads=4", "--seq=32", "--batch=4", "--repeats=1"]
    command = [*torchrun, "--nproc-per-node=4", "benchmarks/pair.py", "--before=.", "--compile"]
    done = subprocess.run(
        [*command, "--grid=2x2", *sizes],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
def test_compiled_steps_beside_eager(tmp_path: Path) -> None:
    """Each way of each plan is timed, and what they compute is the same."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sizes = ["--hidden=32", "--heads=4", "--seq=16", "--batch=4", "--layers=1", "--repeats=2"]
    out = tmp_path / "compiled.json"
    plans = ["--plans=tp-sp,tp2d", "--grid=2x1", f"--json={out}"]
    done = subprocess.run(
        [*torchrun, "benchmarks/compiled.py", *plans, *sizes],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = [(record["plan"], record["way"]) for record in json.loads(out.read_text())]
    stock = "tp-sp", "tp-sp (efficient reduce-scatter)"
    wanted = [(plan, way) for way in ("eager", "compiled") for plan in (*stock, "tp2d 2x1")]
    assert seen == [*wanted, ("tp2d 2x1", "overlapped")]


def test_two_checkouts_take_turns() -> None:
    """In every round each plan steps in both, in an order that is the same on every rank."""
    rounds = list(pair.orders(["a", "b"], 5))
    both = [("before", "a"), ("before", "b"), ("now", "a"), ("now", "b")]
    assert all(sorted(one) == both for one in rounds)
    assert rounds == list(pair.orders(["a", "b"], 5)) and len(set(map(tuple, rounds))) > 1
