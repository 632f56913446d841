"""The tutorials' scripts, started as a user starts them, and the Llama 2 that they train."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import common
import numpy as np
import pytest
import torch
from llama2 import SIZES, Llama2, Llama2Config, rotary_table, rotate
from plans import llama2_2d

import torch_tp2d
from support import models, world
from support.marks import deep

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TOLERANCE = 1e-11
VOCAB = 33


def surroundings() -> dict[str, str]:
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(paths)}
    return os.environ | ours


def start(*command: object, **environment: str) -> str:
    """What a command says; it must succeed, and warn of nothing."""
    done = subprocess.run(
        [str(part) for part in command],
        env=surroundings() | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    everything = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, everything
    assert "Warning" not in done.stderr, everything
    return done.stdout


def torchrun(processes: int, script: str, *args: object) -> str:
    return start(*TORCHRUN, "--nproc-per-node", processes, TUTORIALS / script, *args)


def losses(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert lines
    return lines


def agrees(output: str) -> bool:
    return output.rstrip().endswith(": the same")


def _logits_differ_by(output: str) -> float:
    found = re.search(r"logits in plain transformers differ by (\S+)", output)
    assert found
    return float(found.group(1))


@pytest.fixture(scope="module")
def on_one_host() -> str:
    return torchrun(4, "tp2d_example.py", "--steps", 3, "--dtype", "fp64")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers in the place of the text, which takes an index of packages to fetch."""
    for package in ("tiktoken", "tqdm"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("tokens")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        np.save(folder / f"{split}.npy", generator.integers(0, 50257, 1000).astype(np.uint16))
    return folder


def _checkpoint_and_text(folder: Path) -> Path:
    """A small Llama with the weights of transformers, and tokens to train on beside them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    np.save(folder / "model" / "train.npy", (np.arange(5000) * 7 % 101).astype(np.uint16))
    return folder / "model"


class TestScripts:
    @pytest.mark.deep
    def test_feed_forward(self, on_one_host: str) -> None:
        assert agrees(on_one_host)
        assert len(losses(on_one_host)) == 3
        assert "up.weight      64x16  tp_row S(1), tp_col S(0)  32x8" in on_one_host

    @pytest.mark.deep
    def test_sequence(self) -> None:
        output = torchrun(4, "sequence_tp2d_example.py", "--steps", 2, "--dtype", "fp64")
        assert agrees(output)

    @pytest.mark.deep
    def test_fsdp(self) -> None:
        assert agrees(torchrun(4, "fsdp_tp2d_example.py", "--steps", 2, "--dtype", "fp64"))

    @pytest.mark.deep
    def test_llama2(self, tokens: Path) -> None:
        args = ("--data", tokens, "--steps", 2, "--seq", 8, "--batch", 2, "--verify")
        assert agrees(torchrun(2, "llama2_tp2d.py", *args, "--grid", "2x1", "--recompute"))

    @pytest.mark.deep
    def test_fsdp_of_two_replicas(self) -> None:
        output = torchrun(8, "fsdp_tp2d_example.py", "--steps", 3, "--dtype", "fp64")
        assert agrees(output)
        assert "dp S(0), tp_row S(1), tp_col S(0)" in output

    @pytest.mark.deep
    @pytest.mark.parametrize(
        "options",
        [
            "--grid 2x2",
            "--grid 1x2 --dp 2 --compile",
            "--grid 2x1 --plan 1d --dp 2",
            "--grid 2x2 --compile --recompute",
        ],
    )
    def test_llama2_options(self, options: str, tokens: Path) -> None:
        args = ("--data", tokens, "--steps", 2, "--seq", 8, "--batch", 4, "--verify")
        assert agrees(torchrun(4, "llama2_tp2d.py", *args, "--dtype", "fp64", *options.split()))

    @pytest.mark.deep
    def test_from_one_checkpoint_of_hugging_face_to_another(self, tmp_path: Path) -> None:
        """On FSDP2 x a line, and on a grid: the same losses, and transformers' own logits."""
        args = ("--model", _checkpoint_and_text(tmp_path), "--seq", 16, "--lr", 1e-2, "--recompute")
        said = {}
        for name, options in {"fsdp": "--dp 2 --grid 1x2", "grid": "--grid 2x2"}.items():
            checkpoint = ("--checkpoint", tmp_path / name)
            for steps in (2, 4):
                export = ("--steps", steps, "--export", tmp_path / f"{name}-{steps}")
                output = torchrun(
                    4, "finetune_hf.py", *args, *options.split(), *checkpoint, *export
                )
                assert _logits_differ_by(output) < 1e-6
                assert ("resumed at step 2" in output) == (steps == 4)
                said[name, steps] = [line.partition(",")[0] for line in losses(output)]
        assert said["fsdp", 2] == said["grid", 2]
        assert said["fsdp", 4] == said["grid", 4]
        values = [float(line.split()[-1]) for line in said["grid", 2] + said["grid", 4]]
        assert len(values) == 4 and values[-1] < values[0]

    @pytest.mark.deep
    def test_the_same_by_lightning(self, tmp_path: Path) -> None:
        """The losses of the script without it; resumed on another grid, and exported."""
        pytest.importorskip("lightning")
        args = ("--model", _checkpoint_and_text(tmp_path), "--seq", 16, "--lr", 1e-2)
        fsdp, grid = ("--dp", 2, "--grid", "1x2"), ("--grid", "2x2")
        saved, out = ("--checkpoint", tmp_path / "saved"), ("--export", tmp_path / "out")
        wanted = losses(torchrun(4, "finetune_hf.py", *args, *grid, "--steps", 4))
        first = torchrun(4, "finetune_lightning.py", *args, *fsdp, "--steps", 4, *saved)
        assert losses(first) == [line.partition(",")[0] for line in wanted]
        output = torchrun(4, "finetune_lightning.py", *args, *grid, "--steps", 6, *saved, *out)
        assert [line.partition(":")[0] for line in losses(output)] == ["step 5", "step 6"]
        assert _logits_differ_by(output) < 1e-6

    @pytest.mark.deep
    @pytest.mark.parametrize("plan", ["1d", "1d-sp", "2d", "bmr"])
    def test_gpt2(self, plan: str, tokens: Path) -> None:
        args = ("--data", tokens, "--steps", 2, "--seq", 8, "--batch", 4, "--verify")
        args += ("--size", "tiny", "--eval-batches", 1, "--dtype", "fp64")
        assert agrees(torchrun(4, "train_gpt2.py", *args, "--plan", plan))


def worker(parent: int, rank: int) -> int:
    """The process id of a rank that torchrun, process ``parent``, has started."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if f"PPid:\t{parent}\n" in status.read_text():
                environment = status.with_name("environ").read_bytes().split(b"\0")
                if f"LOCAL_RANK={rank}".encode() in environment:
                    return int(status.parent.name)
    raise AssertionError(f"process {parent} has no rank {rank}")


def logged(path: Path) -> list[dict[str, float]]:
    """What the training has logged, whole lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class TestResuming:
    @pytest.mark.deep
    def test_torchrun_starts_again_from_the_last_whole_checkpoint(
        self, tokens: Path, tmp_path: Path
    ) -> None:
        """A rank is killed; the run ends with the losses of one that nothing befell, bit for bit.

        Beside the checkpoints lies one that was killed while it was written. Symptom: all that
        torchrun started again ended in "Connection refused", in every run. Cause: torch's own, as
        a script of stock gloo shows too; torchrun keeps its store, and in it the addresses of the
        processes that are gone (pytorch#135712).
        """
        args = ("--data", tokens, "--seq", 8, "--batch", 4, "--size", "tiny", "--dtype", "fp64")
        args += ("--steps", 40, "--eval-batches", 1)
        quiet, log = tmp_path / "quiet.jsonl", tmp_path / "killed.jsonl"
        torchrun(4, "train_gpt2.py", *args, "--log-file", quiet)

        half = tmp_path / "checkpoints" / "step-00000039"
        half.mkdir(parents=True)
        (half / "__1_0.distcp").write_bytes(b"half")
        (half / ".metadata.tmp").write_bytes(b"half")
        saving = ("--checkpoint", half.parent, "--checkpoint-every", 5, "--log-file", log)
        script = (TUTORIALS / "train_gpt2.py", *args, *saving)
        command = (*TORCHRUN, "--nproc-per-node", 4, "--max-restarts", 1, *script)
        with open(tmp_path / "said", "w") as said:
            run = subprocess.Popen(
                [str(part) for part in command],
                env=surroundings() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=said,
                stderr=said,
            )
        try:
            while len(logged(log)) < 8:
                assert run.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.05)
            os.kill(worker(run.pid, 1), signal.SIGKILL)
            assert run.wait(timeout=500) == 0, (tmp_path / "said").read_text()
        finally:
            run.kill()
        resumed = re.search(r"resumed at step (\d+)", (tmp_path / "said").read_text())
        assert resumed is not None
        assert int(resumed[1]) in range(5, 40, 5)
        wanted = [(line.get("step"), line.get("loss")) for line in logged(quiet)]
        last = {line.get("step"): line.get("loss") for line in logged(log)}
        assert list(last.items()) == wanted
        assert logged(log)[-1] == logged(quiet)[-1]

    def test_restarts_that_would_not_connect_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"LOCAL_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            common.set_up()


class TestManyNodes:
    @pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="hosts of network namespaces need root and iproute2",
    )
    @pytest.mark.deep
    def test_two_hosts_train_as_one_does(self, on_one_host: str) -> None:
        script = TUTORIALS / "tp2d_example.py"
        run = (sys.executable, TUTORIALS / "two_hosts.py", "--timeout", 200)
        output = start(*run, script, "--steps", 3, "--dtype", "fp64")
        assert agrees(output)
        assert losses(output) == losses(on_one_host)

    @pytest.mark.deep
    def test_a_slurm_job(self, tmp_path: Path) -> None:
        """The job itself, under stand-ins for Slurm that take this machine for two nodes."""
        stand_ins = {
            "scontrol": "echo localhost; echo localhost",
            "srun": 'shift; "$@" & first=$!; "$@" & wait $first && wait $!',
        }
        for name, does in stand_ins.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
            (tmp_path / name).chmod(0o755)
        output = start(
            "bash",
            TUTORIALS / "slurm" / "torchrun.sbatch",
            TUTORIALS / "tp2d_example.py",
            *("--grid", "1x2", "--steps", 2),
            PATH=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.defpath]),
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_JOB_NUM_NODES="2",
            SLURM_JOB_NODELIST="node[1-2]",
            NPROC_PER_NODE="1",
        )
        assert agrees(output)


def _train(rows: int, columns: int, kv_heads: int) -> float:
    config = Llama2Config(
        vocab_size=VOCAB, dim=32, n_layers=2, n_heads=8, n_kv_heads=kv_heads, multiple_of=8
    )
    reference = Llama2(config).double()
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, models.grid_mesh(rows, columns), llama2_2d())
    return models.train_beside(reference, model, VOCAB, size=3, sequence=13)


class TestLlama2:
    @pytest.mark.parametrize("rows,columns,kv_heads", [(2, 2, 2), deep(1, 4, 4), deep(4, 1, 1)])
    def test_as_on_one_device(self, rows: int, columns: int, kv_heads: int) -> None:
        assert max(world.run(4, _train, rows, columns, kv_heads)) < TOLERANCE

    def test_keys_that_cannot_be_shared_out_are_refused(self) -> None:
        with pytest.raises(world.RankFailed, match="2 heads of 4, which do not divide over tp_col"):
            world.run(4, _train, 1, 4, 2)

    def test_weights_depend_on_the_seed_alone(self) -> None:
        config = Llama2Config(vocab_size=VOCAB, dim=16, n_layers=1, n_heads=2)
        first, other = Llama2(config, 1), Llama2(config, 2)
        torch.manual_seed(torch.initial_seed() + 1)
        again = Llama2(config, 1)
        assert torch.equal(first.output.weight, again.output.weight)
        assert not torch.equal(first.output.weight, other.output.weight)

    def test_positions_turn_pairs_as_complex_numbers(self) -> None:
        """Equation 15 of RoFormer, which is written out in real numbers in the model."""
        x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
        turned = rotate(x, rotary_table(5, 8, 10000.0, x.device))
        angles = torch.outer(torch.arange(5.0), 10000.0 ** (-torch.arange(4.0) / 4))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        wanted = torch.view_as_real(torch.view_as_complex(x.view(2, 5, 3, 4, 2)) * turns)
        torch.testing.assert_close(turned, wanted.flatten(-2), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("size,billions", [("7b", 6.74), ("13b", 13.02), ("70b", 68.98)])
    def test_sizes(self, size: str, billions: float) -> None:
        with torch.device("meta"):
            model = Llama2(SIZES[size])
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(billions * 1e9, rel=1e-3)

    def test_sizes_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match="multiple of 16"):
            Llama2Config(dim=24, n_heads=8)
        with pytest.raises(ValueError, match="one of its divisors"):
            Llama2Config(dim=64, n_heads=4, n_kv_heads=3)

    @pytest.mark.deep
    def test_is_the_llama_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = SIZES["tiny"]
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.dim,
                intermediate_size=config.ffn_features,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.n_heads,
                num_key_value_heads=config.kv_heads,
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=False,
            )
        )
        ours = Llama2(config)
        theirs.load_state_dict(_renamed(ours))
        ids = torch.randint(0, config.vocab_size, (2, 16))
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def _renamed(model: Llama2) -> dict[str, torch.Tensor]:
    """A state dict under transformers' names."""
    names = {
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
        "layers": "model.layers",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    renamed = {}
    for name, value in model.state_dict().items():
        parts: Sequence[str] = name.removesuffix(".weight").split(".")
        if parts[0] == "layers":
            name = f"model.layers.{parts[1]}.{names['.'.join(parts[2:])]}.weight"
        else:
            name = f"{names[parts[0]]}.weight"
        if parts[-1] in ("wq", "wk"):
            # They turn features i and i + D/2 together, Meta and we 2i and 2i + 1.
            pairs = value.unflatten(0, (-1, model.config.head_dim // 2, 2))
            value = pairs.transpose(1, 2).flatten(0, 2)
        renamed[name] = value
    return renamed
