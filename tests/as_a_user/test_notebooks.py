"""The notebooks run from a new kernel; those in the repository are what such a run left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
sys.path.append(str(TUTORIALS))
NOTEBOOKS = sorted(path.name for path in TUTORIALS.glob("*.ipynb"))
MOST_BYTES = 1_500_000

nbformat = pytest.importorskip("nbformat")


def text_of(output: Any) -> str:
    """What an output shows, or the traceback of an error."""
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_files_that_are_read_are_there(name: str) -> None:
    """Measurements were put into a newer file and the older one removed, which a notebook read: it
    ended there, and only the run of all of it, which is deep, saw that."""
    cells = nbformat.read(TUTORIALS / name, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    for path in re.findall(r'Path\("([^"]+)"\)\.read_text', code):
        assert (TUTORIALS / path).is_file(), path


@pytest.mark.deep
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_from_a_new_kernel(name: str) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib", "tiktoken"):
        pytest.importorskip(package)
    import build_notebooks
    import text

    if name == "gpt2_tp2d.ipynb":
        try:
            text.prepare()
        except RuntimeError as error:
            pytest.skip(f"no text to train on: {error}")
    notebook = build_notebooks.execute(TUTORIALS / name)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", text_of(output)
            # Warnings, of whatever wrote them, come this way.
            assert output.get("name") != "stderr", text_of(output)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_is_committed_with_outputs_and_nothing_of_one_run(name: str) -> None:
    import build_notebooks

    path = TUTORIALS / name
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert any(cell.get("outputs") for cell in notebook.cells)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert not re.search(r"/(home|root|work|tmp)/", text_of(output)), text_of(output)
    before = nbformat.writes(notebook)
    build_notebooks.strip(notebook)
    assert nbformat.writes(notebook) == before, "run tutorials/build_notebooks.py"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_are_clean(name: str) -> None:
    """ruff reads no cell that begins with a magic of ours."""
    cells = nbformat.read(TUTORIALS / name, as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    code = "\n\n".join(re.sub(r"^%.*\n?", "", source, flags=re.MULTILINE) for source in sources)
    # Imports stand where they are wanted, and again where ranks begin anew; a semicolon at the
    # end of a cell keeps its value from being shown twice.
    command = ["check", "--extend-ignore=E402,E703,F811,I001", "--stdin-filename=cells.py", "-"]
    ruff = pytest.importorskip("ruff")
    done = subprocess.run(
        [ruff.find_ruff_bin(), *command], input=code, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_are_small() -> None:
    assert NOTEBOOKS == ["gpt2_tp2d.ipynb", "llama2_tp2d.ipynb"]
    pictures = (TUTORIALS / "pictures").iterdir()
    together = [*(TUTORIALS / name for name in NOTEBOOKS), *pictures]
    assert sum(path.stat().st_size for path in together) < MOST_BYTES


@pytest.fixture
def ranks() -> Iterator[Any]:
    from notebook_ranks import Ranks

    made = Ranks(2)
    yield made
    made.close()


@pytest.mark.deep
def test_what_fails_on_a_rank_fails_in_the_notebook(
    ranks: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed ``!torchrun`` leaves a notebook green; ranks that wait for a dead one hang it."""
    import notebook_ranks
    from notebook_ranks import RankFailed, Ranks

    ranks.run("import torch, torch.distributed as dist\ntotal = torch.ones(1)")
    ranks.run("dist.all_reduce(total)\nprint('rank', dist.get_rank())")
    assert capsys.readouterr().out == "rank 0\n"
    assert ranks["(dist.get_rank(), total.item())"] == [(0, 2.0), (1, 2.0)]

    monkeypatch.setattr(notebook_ranks, "GRACE", 0.5)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="(?s)rank 1:.*1 / 0.*ZeroDivisionError"):
        ranks.run("if dist.get_rank():\n    1 / 0\ndist.barrier()")
    assert time.monotonic() - began < 30
    with pytest.raises(RankFailed, match="have ended"):
        ranks.run("pass")

    ranks = Ranks(2)
    ranks.run("import os, time")
    with pytest.raises(RankFailed, match="rank 1:\nthe process died"):
        ranks.run("if os.environ['RANK'] == '1':\n    os._exit(3)\ntime.sleep(60)")
    ranks = Ranks(2)
    monkeypatch.setattr(notebook_ranks, "TIMEOUT", 0.5)
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not end"):
        ranks.run("import time\ntime.sleep(60)")


def test_a_block_is_found_by_its_values() -> None:
    import torch
    from pictures import block_of

    whole = torch.randn(4, 6, 5, dtype=torch.float64)
    assert block_of(whole[2:4, 3:6], whole) == ((2, 4), (3, 6), (0, 5))
    with pytest.raises(ValueError, match="no block"):
        block_of(whole[2:4] * 0.5, whole)


def test_link_rates_drawn_are_those_that_the_command_measures() -> None:
    sys.path.append(str(TUTORIALS.parent / "benchmarks"))
    import link_rates
    from pictures import plan_record

    path = TUTORIALS.parent / "benchmarks" / "results" / "link_rates.json"
    found = json.loads(path.read_text())["cases"]
    cases = link_rates.link_rate_cases()
    assert list(found) == [case.name for case in cases]
    for case in cases:
        assert not case.name.startswith("m") or case.name == f"m{case.batch * case.seq / 512:g}"
        for plan in link_rates.PLANS:
            on_grid = plan not in ("tp-input", "fsdp-kept")
            record = plan_record(found[case.name], f"{plan} 2x2" if on_grid else plan)
            assert record["base"] == link_rates.PLANS[0]
