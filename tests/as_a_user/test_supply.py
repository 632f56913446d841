"""What the project takes from elsewhere: files that it reads, packages that it installs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
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


@pytest.mark.deep
def test_wheel_and_sdist_are_whole(tmp_path: Path) -> None:
    """The wheel runs by itself, the sdist has what a checkout has, both the version of the tag."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11

    def python(*args: object, path: Path | None = None, here: Path = tmp_path) -> str:
        command = [sys.executable, *map(str, args)]
        given = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
        done = subprocess.run(command, cwd=here, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def git(*args: object) -> str:
        return subprocess.check_output(["git", *map(str, args)], text=True)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools, site, out, clone = (tmp_path / name for name in ("tools", "site", "dist", "clone"))
    constraints = ROOT / ".ci" / "constraints.txt"
    built_with = project["build-system"]["requires"]
    python("-m", "pip", "install", "--quiet", "--target", tools, "-c", constraints, *built_with)
    git("clone", "--quiet", ROOT, clone)
    git("-C", clone, "tag", "v1.2.3")
    python("-m", "hatchling", "build", "-d", out, path=tools, here=clone)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")

    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    said = python("-m", "torch_tp2d", "--version", path=site)
    assert said.startswith("torch_tp2d 1.2.3, torch ")
    modules = [
        ".".join(path.relative_to(clone).with_suffix("").parts)
        for path in (clone / "torch_tp2d").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") and "integrations" not in path.parts
    ]
    found = python(
        "-c",
        f"import importlib, torch_tp2d; [importlib.import_module(m) for m in {modules}]; "
        "print(torch_tp2d.__file__)",
        path=site,
    )
    assert found.startswith(str(site))

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = git("-C", clone, "ls-files").splitlines()
    kept = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    folders = tuple(f"{name}/" for name in kept if (clone / name).is_dir())
    missing = [name for name in tracked if name.startswith(folders) and name not in packed]
    assert not missing
