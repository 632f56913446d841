"""What the project takes from elsewhere: files that it reads, packages that it installs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAFE = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
READERS = {f"{module}.{name}" for module in ("pickle", "cloudpickle") for name in ("load", "loads")}
BETWEEN_OWN_PROCESSES = {"tutorials/notebook_ranks.py"}
"""Where pickles come through a pipe from a process that the file itself has started."""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("folder", ["torch_tp2d", "tutorials", "benchmarks"])
def test_no_file_is_read_as_a_pickle(folder: str) -> None:
    """As SECURITY.md says; every call writes the safe choice out."""
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for called, call in calls(path):
            if called in READERS and name not in BETWEEN_OWN_PROCESSES:
                wrong.append(f"{name}:{call.lineno} {called}")
            if called in SAFE:
                keyword, value = SAFE[called]
                given = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
                if given.get(keyword) is not value:
                    wrong.append(f"{name}:{call.lineno} {called} without {keyword}={value}")
    assert not wrong


def test_every_direct_requirement_is_pinned_in_its_range() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    requirements = pytest.importorskip("packaging.requirements")
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["test"],
        *extras["tutorials"],
        *extras["docs"],
    ]
    for text in wanted:
        wants = requirements.Requirement(text)
        assert wants.name in pinned, text
        assert wants.specifier.contains(pinned[wants.name]), (text, pinned[wants.name])
