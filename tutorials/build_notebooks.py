"""Runs the notebooks, writes their outputs into them, and exports the pictures of the README.

    python tutorials/build_notebooks.py [NAME.ipynb ...]

A cell whose metadata have ``"picture": NAME`` gives ``pictures/NAME.png``. What changes from run
to run without a meaning (execution counts and times, ids of this environment) is left out.
"""

from __future__ import annotations

import argparse
import base64
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = 660
"""Seconds that a cell may take."""


def execute(path: Path) -> Any:
    """The notebook, run from a new kernel as it would be in its folder.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    # The ranks, and the kernel, find the project and the tutorials' modules by it.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), str(HERE.parent), before)))
    try:
        nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            resources={"metadata": {"path": str(HERE)}},
            record_timing=False,
        ).execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return notebook


def strip(notebook: Any) -> None:
    """Leave out what differs from run to run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{number:02}"
        kept = {key: cell.metadata[key] for key in ("picture",) if key in cell.metadata}
        cell.metadata = kept
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        merged: list[Any] = []
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = None
            output.get("metadata", {}).clear()
            # A stream comes in pieces, as it was flushed.
            last = merged[-1] if merged else None
            if last and output.output_type == "stream" == last.output_type:
                if output.name == last.name:
                    last.text += output.text
                    continue
            merged.append(output)
        cell.outputs = merged


def export(notebook: Any, folder: Path) -> None:
    """Write the pictures that the cells name."""
    folder.mkdir(exist_ok=True)
    for cell in notebook.cells:
        name = cell.metadata.get("picture")
        for output in cell.get("outputs", []):
            image = output.get("data", {}).get("image/png")
            if name and image:
                (folder / f"{name}.png").write_bytes(base64.b64decode(image))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="some of them (all)")
    args = parser.parse_args()
    import nbformat

    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        notebook = execute(path.resolve())
        strip(notebook)
        export(notebook, HERE / "pictures")
        nbformat.write(notebook, path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
