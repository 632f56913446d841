"""The Python of README and the pages of docs, run as printed; their links; what they quote."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import world
from support.marks import deep

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if "```python" in path.read_text()]
SLOW = {"choose-a-grid", "hugging-face", "long-sequences", "migrate", "own-model", "training"}

TUTORIALS_MODEL = """
import sys

import torch

sys.path.insert(0, "tutorials")
from llama2 import SIZES, Llama2

torch.manual_seed(0)
model = Llama2(SIZES["tiny"])
ids, target = torch.randint(0, 32000, (2, 3, 9)).unbind()
"""
HUGGING_FACES_MODEL = """
import torch_tp2d
from torch.distributed.device_mesh import init_device_mesh
from torch_tp2d import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=1, **sizes))
"""


def python_of(text: str) -> str:
    """A page's blocks of Python on the lines where they stand, so that a traceback names these."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.strip().startswith("```")
        inside = not inside and line.strip() == "```python" if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines)


def _run(source: str, name: str, folder: str) -> None:
    """A page on this rank, where it may write and finds the tutorials."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        sys.path[:] = [path for path in sys.path if path != "tutorials"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "tutorials").symlink_to(ROOT / "tutorials")
    return str(tmp_path)


@pytest.mark.parametrize(
    "name", [deep(page.stem) if page.stem in SLOW else page.stem for page in PAGES]
)
def test_a_page_runs_as_printed(name: str, folder: str) -> None:
    source = python_of((DOCS / f"{name}.md").read_text())
    world.run(4 if "init_device_mesh" in source else 1, _run, source, f"{name}.md", folder)


def test_readme_runs_as_printed(folder: str) -> None:
    """Its plan left a Linear out, and its model was given by nobody."""
    text = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    new = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    world.run(4, _run, TUTORIALS_MODEL + new, "README.md", folder)
    world.run(4, _run, TUTORIALS_MODEL + HUGGING_FACES_MODEL + python_of(text), "README.md", folder)
    old = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    world.run(4, _run, TUTORIALS_MODEL.replace("(2, 3, 9)", "(2, 4, 8)") + old, "README.md", folder)


def _said(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)  # type: ignore[misc]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_quoted_messages_are_the_librarys() -> None:
    said = {
        re.sub("…+", "…", _said(node))
        for path in (ROOT / "torch_tp2d").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant) and len(_said(node)) > 40
    }
    quoted = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 12
    for message in quoted:
        # From wherever the heading begins, a "…" stands for any words.
        parts = re.split("…+", message)
        pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(one) for one in said if max(parts, key=len) in one), message


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text):
            there = (page.parent / target if target else page).read_text()
            titles = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, (page.name, target, anchor)


@pytest.mark.deep
def test_the_pages_build(tmp_path: Path) -> None:
    """Without a warning: each page in the table of contents, each docstring readable."""
    pytest.importorskip("sphinx")
    command: list[Any] = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        DOCS,
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
