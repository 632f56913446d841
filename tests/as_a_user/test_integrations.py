"""Models that transformers and Lightning load and train on a grid, beside one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_tp2d
from support import hf, models, world
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, Rowwise2D

world.preload("support.preload_integrations")

NAMED = {
    "model.embed_tokens": "rowwise_2d",
    "model.layers.*.input_layernorm": "replicate_2d",
    "model.layers.*.self_attn.q_proj": "colwise_2d",
    "model.layers.*.self_attn.k_proj": "colwise_2d",
    "model.layers.*.self_attn.v_proj": "colwise_2d",
    "model.layers.*.self_attn.o_proj": "rowwise_2d",
    "model.layers.*.post_attention_layernorm": "replicate_2d",
    "model.layers.*.mlp.gate_proj": "colwise_2d",
    "model.layers.*.mlp.up_proj": "colwise_2d",
    "model.layers.*.mlp.down_proj": "rowwise_2d",
    "model.norm": "replicate_2d",
    "lm_head": "colwise_2d_gather_output",
}
AUTO_CLASSES = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}
VOCAB = 67


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def _save(kind: str, path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB}
    if kind == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    elif kind == "bert":
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 48, "max_position_embeddings": 16}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    else:
        sizes |= {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, decoder_start_token_id=0)
        )
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of a tiny Llama, saved once for each set of changes to its config."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def save(**changes: Any) -> str:
        path = folder / "-".join(["llama", *(f"{k}{v}" for k, v in changes.items())])
        if not path.exists():
            _llama(**changes).save_pretrained(path)
        return str(path)

    return save


def _auto_class(path: str) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    return getattr(transformers, f"AutoModelFor{AUTO_CLASSES.get(config.model_type, 'CausalLM')}")


def _on_one_device(path: str) -> nn.Module:
    return _auto_class(path).from_pretrained(path, dtype=torch.float64)


def _by_plan(path: str, rows: int, columns: int, **options: Any) -> nn.Module:
    from torch_tp2d.integrations.transformers import from_pretrained
    from torch_tp2d.plans import plan_for

    mesh = grid_mesh(rows, columns)
    plan = (lambda model: plan_for(model, mesh, **options)) if options else None
    return from_pretrained(_auto_class(path), path, mesh, plan, dtype=torch.float64)


def _by_name(path: str, rows: int, columns: int, **changes: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    from torch_tp2d.integrations.transformers import register

    mesh = grid_mesh(rows, columns)
    register(mesh)
    plan = {**NAMED, **changes}
    config = DistributedConfig(tp_size=rows * columns, tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, distributed_config=config
    )


class _Reads:
    """Counts the elements that transformers' loader reads from a checkpoint."""

    def __enter__(self) -> _Reads:
        from transformers import core_model_loading
        from transformers.distributed.sharding_utils import DtensorShardOperation

        # Lists, as the loader reads in threads: a sum lost what two of them added at once.
        self.sharded: list[int] = []
        self.whole: list[int] = []
        shard, copy = DtensorShardOperation.shard_tensor, core_model_loading._materialize_copy
        self.patch = pytest.MonkeyPatch()

        def read_shard(*args: Any, **kwargs: Any) -> Tensor:
            value = shard(*args, **kwargs)
            self.sharded.append(value.numel())
            return value

        def read_whole(*args: Any, **kwargs: Any) -> Tensor:
            value = copy(*args, **kwargs)
            self.whole.append(value.numel())
            return value

        self.patch.setattr(DtensorShardOperation, "shard_tensor", read_shard)
        self.patch.setattr(core_model_loading, "_materialize_copy", read_whole)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def _loaded_and_trained(
    load: Callable[..., nn.Module], path: str, *grid: int, **options: Any
) -> tuple[hf.Differences, float]:
    """What differs over two AdamW steps, and this rank's share of the model times all ranks."""
    reference = _on_one_device(path)
    with _Reads() as reads:
        model = load(path, *grid, **options)
    parameters = list(model.parameters())
    held = sum(param.to_local().numel() for param in parameters)
    assert {param.device.type for param in parameters} == {"cpu"}
    assert (sum(reads.sharded), reads.whole) == (held, [])
    whole_logits = load is _by_name
    seen = hf.train_beside(
        reference,
        model,
        hf.causal_lm_batch(3, 9, VOCAB),
        loss=hf.causal_lm_truth if whole_logits else hf.own_loss,
        steps=2,
    )
    share = held * grid[0] * grid[1] / sum(param.numel() for param in reference.parameters())
    return seen, share


@pytest.mark.deep
@pytest.mark.parametrize(
    "load,rows,columns",
    [(_by_plan, 2, 2), (_by_name, 1, 4), (_by_plan, 1, 4), (_by_name, 2, 2)],
)
def test_transformers_loads_straight_into_shards(
    saved: Callable[..., str], load: Callable[..., nn.Module], rows: int, columns: int
) -> None:
    """Loss, gradients, clip norm and two AdamW steps; and each rank read no more than it keeps."""
    for tied in (False, True):
        path = saved(tie_word_embeddings=tied)
        for seen, share in world.run(
            rows * columns, _loaded_and_trained, load, path, rows, columns
        ):
            assert seen.worst < hf.TOLERANCE, seen
            # Five norms of 32 are whole on every rank, and 67 does not divide.
            assert share < 1.1


def _another_model(path: str, rows: int, columns: int) -> hf.Differences:
    reference, model = _on_one_device(path), _by_plan(path, rows, columns)
    truth = hf.causal_lm_truth if model.config.model_type == "gpt2" else hf.own_loss
    return hf.train_beside(reference, model, hf.causal_lm_batch(3, 9, VOCAB), truth=truth, steps=1)


@pytest.mark.parametrize("kind", [deep("gpt2"), deep("bert"), deep("t5")])
def test_other_models_load_too(tmp_path: Path, kind: str) -> None:
    """A fused projection, a bias that is tied to a module without a style, two token streams.

    BERT's bias is loaded into ``cls.predictions``, which no entry names, and tied to the decoder's
    after: it came out whole on every rank, and the first forward refused the model.
    """
    _save(kind, tmp_path)
    for seen in world.run(4, _another_model, str(tmp_path), 2, 2):
        assert max(seen.loss, seen.gradient, seen.norm) < hf.TOLERANCE, seen


def _other_plans(path: str) -> list[float]:
    """Options and a plan of one's own, saved again and loaded on one device, generation of text."""
    mesh_path = f"{path}-saved-again"
    model = _by_plan(path, 2, 2, sequence_parallel=False, loss_parallel=False)
    reference = _on_one_device(path)
    ids = hf.causal_lm_batch(4, 6, VOCAB)(0)["input_ids"]
    with torch.no_grad():
        differences = [relative(model(ids).logits, reference(ids).logits)]
    model.save_pretrained(mesh_path)
    again = _on_one_device(mesh_path)
    for param, wanted in zip(again.parameters(), reference.parameters(), strict=True):
        differences.append(relative(param.detach(), wanted.detach()))
    return differences


def test_what_was_loaded_is_saved_again(saved: Callable[..., str]) -> None:
    path = saved(tie_word_embeddings=True)
    for differences in world.run(4, _other_plans, path):
        assert max(differences) < hf.TOLERANCE


def _saved_again(path: str, folder: str, wrapped: bool) -> bool:
    from torch_tp2d.integrations.transformers import from_pretrained, save_pretrained

    model_class = _auto_class(path)
    if wrapped:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
        grid = mesh["tp_row", "tp_col"]
        model = _on_one_device(path)
        torch_tp2d.parallelize_module(model, grid, torch_tp2d.plan_for(model, grid))
        fully_shard(model, mesh=mesh["dp"])
    else:
        model = from_pretrained(model_class, path, grid_mesh(2, 2), dtype=torch.float64)
    save_pretrained(model, folder)
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        save_pretrained(nn.Linear(2, 2), folder)
    # On every rank, none of which waits for the first.
    with pytest.raises(RuntimeError, match="rank 0 could not write .*Llama"):
        save_pretrained(model, folder, max_shard_size="much")
    reference, again = (
        model_class.from_pretrained(where, dtype=torch.float64).state_dict()
        for where in (path, folder)
    )
    return all(torch.equal(again[name], weight) for name, weight in reference.items())


@pytest.mark.parametrize("wrapped", [False, deep(True)])
def test_saved_for_plain_transformers(
    saved: Callable[..., str], tmp_path: Path, wrapped: bool
) -> None:
    """A model's own save_pretrained ends in "data pointer on an invalid python storage"."""
    folder = str(tmp_path / "again")
    assert all(world.run(4, _saved_again, saved(), folder, wrapped))


def _refusals(path: str, grouped: str, tied: str) -> None:
    from transformers import AutoModelForCausalLM

    from torch_tp2d.integrations.transformers import from_pretrained, register

    mesh = grid_mesh(2, 2)
    ids = hf.causal_lm_batch(4, 6, VOCAB)(0)["input_ids"]
    arguments = AutoModelForCausalLM, path, mesh
    with pytest.raises(TypeError, match=r"\['tp_size'\] place a model without a grid"):
        from_pretrained(*arguments, tp_size=4)
    with pytest.raises(ValueError, match=r"'model.layerss.\*' matches no module.*nearest"):
        from_pretrained(*arguments, {"model.layerss.*": Colwise2D()})
    with pytest.raises(TypeError, match="'model.norm' on mesh .*Rowwise2D is for nn.Linear"):
        from_pretrained(*arguments, {"model.norm": Rowwise2D()})
    with pytest.raises(TypeError, match="'mine': expected a style of torch_tp2d"):
        register(mesh, {"mine": Colwise2D})
    unnamed = from_pretrained(*arguments, {"model.layers.*.mlp.up_proj": Colwise2D()})
    for attempt in range(2):
        with pytest.raises(ValueError, match="no plan entry names.*embed_tokens.weight"):
            unnamed(ids)
            pytest.fail(f"attempt {attempt} ran")

    # By name: what no rule names, what is left to the model's own rules, heads that would split.
    model = _by_name(path, 2, 2, **{"model.norm": "replicate"})
    for attempt in range(2):
        with pytest.raises(ValueError, match=r"no plan entry names.*model.norm.weight \(32,\)"):
            model(ids)
            pytest.fail(f"attempt {attempt} ran")
    model = _by_name(path, 2, 2, lm_head="colwise_gather_output")
    with pytest.raises(ValueError, match="lm_head.weight is on mesh"):
        model(ids)
    model = _by_name(grouped, 1, 4)
    with pytest.raises(ValueError, match=r"k_proj.*2 heads of 8.*do not divide over tp_col=4"):
        model(ids)
    # A tie between two layouts shows only when transformers ties again, after loading.
    with pytest.raises(ValueError, match="tied to another module's"):
        _by_name(tied, 2, 2, **{"model.embed_tokens": "colwise_2d"})(ids)


def _a_part_of_the_world(path: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    from torch_tp2d.integrations.transformers import from_pretrained, register

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
    grid = mesh["tp_row", "tp_col"]
    with pytest.raises(ValueError, match="has 2 of 4 ranks.*make a grid of 4"):
        from_pretrained(AutoModelForCausalLM, path, grid)
    register(grid)
    config = DistributedConfig(tp_size=4, tp_plan=NAMED)
    with pytest.raises(ValueError, match="the grid .* is of ranks .*over ranks"):
        AutoModelForCausalLM.from_pretrained(path, distributed_config=config)


def test_transformers_refusals(saved: Callable[..., str]) -> None:
    world.run(4, _refusals, saved(), saved(num_key_value_heads=2), saved(tie_word_embeddings=True))
    world.run(4, _a_part_of_the_world, saved())


def test_another_transformers() -> None:
    from torch_tp2d.integrations.transformers import check_version

    check_version("5.23.1.dev0")
    for found in ("4.57.6", "6.0"):
        with pytest.raises(ImportError, match=rf"works with .* to 5.23, but this is {found}"):
            check_version(found)


STEPS = 4
"""Of Lightning's training, each an epoch of one batch; interrupted after half of them."""


def _lightning_trainer(strategy: Any, devices: int, steps: int, folder: str, **kwargs: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    # What torchrun would have set; the ranks are here already.
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=steps,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        **kwargs,
    )


def _lit_transformer() -> Any:
    from lightning.pytorch import LightningModule

    class LitTransformer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.transformer(33)
            self.losses: list[float] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh
            if any(isinstance(param, DTensor) for param in self.parameters()):
                return
            models.parallelize(self.model, mesh["tp_row", "tp_col"], models.plan_2d())
            if mesh["data_parallel"].size() > 1:
                fully_shard(self.model, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            ids, target = batch
            loss = models.loss_of(self.model(ids), target)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return LitTransformer()


def _data() -> Any:
    batch = models.batch(3, 13, 33)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=3)


def _lightning(folder: str, save_distributed: bool) -> list[float]:
    """Trained on 2 x 2, interrupted and resumed on 1 x 4, beside one device without Lightning."""
    from torch_tp2d.integrations.lightning import GridStrategy

    reference = models.transformer(33)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    wanted = []
    ids, target = models.batch(3, 13, 33)
    for _ in range(STEPS):
        loss = models.loss_of(reference(ids), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())

    differences = []
    path = f"{folder}/checkpoint"
    for grid, until in (((2, 2), STEPS // 2), ((1, 4), STEPS)):
        model = _lit_transformer()
        strategy = GridStrategy(*grid, save_distributed_checkpoint=save_distributed)
        trainer = _lightning_trainer(strategy, 4, until, folder)
        trainer.fit(model, _data(), ckpt_path=path if until == STEPS else None)
        held = sum(param.to_local().numel() for param in model.parameters())
        assert held < 0.34 * sum(param.numel() for param in reference.parameters())
        differences += [
            abs(loss / true - 1)
            for loss, true in zip(model.losses, wanted[until - STEPS // 2 : until], strict=True)
        ]
        trainer.save_checkpoint(path)
    ours = dict(model.model.named_parameters())
    for name, param in reference.named_parameters():
        differences.append(relative(ours[name].detach(), param.detach()))
    return differences


def _lightning_refusals(folder: str) -> None:
    from torch_tp2d.integrations.lightning import GridStrategy

    with pytest.raises(ValueError, match="1 or more, not data_parallel_size=1, rows=0"):
        GridStrategy(0, 2)
    trainer = _lightning_trainer(GridStrategy(2, 2), 2, 1, folder)
    with pytest.raises(ValueError, match=r"rows=2, columns=2 make 4 ranks.*has 2 \(devices=2"):
        trainer.fit(_lit_transformer(), _data())


@pytest.mark.parametrize("save_distributed", [deep(True), deep(False)])
def test_lightning_trains_and_resumes_on_another_grid(
    tmp_path: Path, save_distributed: bool
) -> None:
    pytest.importorskip("lightning")
    if save_distributed:
        world.run(1, _lightning_refusals, str(tmp_path))
    for differences in world.run(4, _lightning, str(tmp_path), save_distributed):
        assert max(differences) < 1e-11
