"""The package and torch: private names that it uses, what importing it changes, what it keeps."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch_tp2d
from torch_tp2d import _requirements

PACKAGE = Path(torch_tp2d.__file__).parent

# Where private names are, beside ``_torch_compat/``.

OF_OTHERS = {"_attn_implementation", "_from_config", "_reorder_cache"}
"""transformers' own: how a config names its attention, how a model is made of a config, and what a
model may have for beam search to ask it to reorder its cache."""
OF_PYTHON = {"_replace"}
"""A NamedTuple's, public for all its underscore."""


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Names with an underscore that the package itself makes."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
    return own


def _private(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of others in a file: imported, read from an object, or asked for by a string.

    What is on a tensor of the user's begins with ``_tp2d``.
    """

    def foreign(name: str) -> bool:
        private = name.startswith("_") and not name.startswith(("__", "_tp2d")) and len(name) > 1
        return private and name not in own | OF_OTHERS | OF_PYTHON

    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [part for part in node.value.split(".") if node.value.isascii()]
            names = [part for part in names if part.isidentifier()] if " " not in node.value else []
        yield from (f"line {node.lineno}: {name}" for name in names if foreign(name))


def test_nothing_else_uses_a_private_name_of_torch() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    compat_trees = [trees.pop(name) for name in list(trees) if name.startswith("_torch_compat")]
    own = _own_names(list(trees.values()))
    found = {name: list(_private(tree, own)) for name, tree in trees.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    there = [name for tree in compat_trees for name in _private(tree, own)]
    assert len(there) > 20, "the search finds what is there"


def test_no_module_outgrows_its_reader() -> None:
    """CONTRIBUTING's bounds."""
    tests = Path(__file__).parents[1]
    bounds = [(path, 400) for path in PACKAGE.rglob("*.py")]
    bounds += [(path, 600) for path in tests.rglob("*.py")]
    lines = {path: len(path.read_text().splitlines()) for path, _ in bounds}
    assert not {path.name: lines[path] for path, bound in bounds if lines[path] > bound}


def test_the_tree_is_the_readmes() -> None:
    """README's section on the code names each file and folder, the linter's layers each module."""
    root = PACKAGE.parent
    written = (root / "README.md").read_text().partition("## The code")[2].split("```")[1]
    named = set(re.findall(r"^  (\w[\w.]*)", written, re.MULTILINE))
    there = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed"}
    assert named == there
    layers = (root / "pyproject.toml").read_text().partition("[tool.importlinter]")[2]
    listed = set(re.findall(r"torch_tp2d\.([\w.]+)", layers.partition("[tool.mypy]")[0]))
    parts = {"planner", "mesh"}
    for name in there - {"__init__.py"} - parts:
        assert name.removesuffix(".py") in listed, name
    for part in parts:
        modules = {path.stem for path in (PACKAGE / part).glob("*.py")} - {"__init__"}
        assert {f"{part}.{module}" for module in modules} <= listed


def test_one_module_asks_whether_a_graph_is_traced() -> None:
    asking = {path.name for path in PACKAGE.rglob("*.py") if "is_compiling" in path.read_text()}
    assert asking == {"_tracing.py"}


def test_no_placements_are_told_by_their_type() -> None:
    """Dynamo of torch 2.12 traces no ``type(placement) is Replicate``: of two that came in, for
    speed, no block could be compiled there.
    """
    for path in PACKAGE.rglob("*.py"):
        found = re.findall(
            r"type\(.*\) (?:is|is not|==|!=) (?:Replicate|Shard|Partial)", path.read_text()
        )
        assert not found, f"{path}: {found}"


def test_a_torch_that_is_too_old_is_refused() -> None:
    """Before anything of it is used, and with the reason: importing a name of torch's failed."""
    pretend = "import torch; torch.__version__ = torch.torch_version.TorchVersion({!r}); "
    code = pretend.format("2.11.0+cpu") + "import torch_tp2d"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torch_tp2d needs torch 2.12 or later"), last
    assert "2.11.0+cpu" in last and "gradients" in last, last
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"torch>={_requirements.OLDEST},' in project


# What importing the package changes

_IMPORTING = """
import ast, importlib, pathlib, sys, warnings, logging
package = pathlib.Path(sys.argv[1])
for path in package.rglob("*.py"):
    if "integrations" in path.parts:
        continue
    for node in ast.walk(ast.parse(path.read_text())):
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in named:
            if name.partition(".")[0] != "torch_tp2d":
                importlib.import_module(name)
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules

def contents(value):
    if isinstance(value, dict):
        return {repr(key): id(item) for key, item in value.items()}
    return sorted(map(repr, value)) if isinstance(value, (list, set)) else id(value)

def state():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None or not hasattr(module, "__file__"):
            continue
        for key, value in list(vars(module).items()):
            seen[f"{name}.{key}"] = contents(value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, item in list(vars(value).items()):
                    seen[f"{name}.{key}.{inner}"] = contents(item)
    rules = DTensor._op_dispatcher.sharding_propagator
    seen.update({f"DTensor rules {key}": contents(value) for key, value in vars(rules).items()})
    seen["dtype"], seen["grad"] = torch.get_default_dtype(), torch.is_grad_enabled()
    seen["threads"], seen["device"] = torch.get_num_threads(), torch.get_default_device()
    seen["random"] = torch.random.get_rng_state().tolist()
    seen["warnings"], seen["handlers"] = list(warnings.filters), list(logging.root.handlers)
    seen["logging"] = logging.root.level, logging.getLogger("torch").level
    return seen

state()  # Which imports what torch imports when it is looked at.
before = state()
import torch_tp2d
after = state()
del before["torch.jit._builtins._builtin_table"]  # By id, of every operator that there is.
for key in sorted(before):
    had, has = before[key], after.get(key)
    if had != has:
        grown = isinstance(has, (dict, list)) and set(had) < set(has)
        print(f"{key}: {sorted(set(has) - set(had)) if grown else 'changed'}")
"""


def test_importing_the_package_changes_nothing_of_torch() -> None:
    """But what three modules register by names of our own, and DTensor's two rules, as they say.

    ``torch.compiler.disable`` as a decorator imported Dynamo, which puts a function of its own in
    the place of ``torch.manual_seed``.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTING, str(PACKAGE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "" and done.returncode == 0
    rules = "_scaled_dot_product_flash_attention_for_cpu"
    for line in done.stdout.lower().splitlines():
        where, new = line.split(": ", 1)
        for entry in ast.literal_eval(new) if new != "changed" else [new]:
            ours = "torch_tp2d" in entry or "gloo_in_order" in entry
            assert ours or (where.startswith("dtensor rules") and rules in entry), line
    assert all(name in done.stdout for name in ("torch_tp2d::arrived", "gloo_in_order", rules))


STATE = {
    # Numbers of fake ranks; and torch's own, exchanged for a while and put back.
    "_torch_compat/distributed.py": {"_first_fake_rank", "_world", "excepthook"},
    "comm/axis.py": {"_links"},  # Rates of links, by process group.
    "comm/groups.py": {"_devices", "_groups"},  # Our own process groups and theirs, by world.
    "comm/pending.py": {"watch"},  # Debug mode's hook on every transfer.
    "debug/collectives.py": {"_watches"},  # Debug mode, on or off.
    "debug/copies.py": {"_every", "_passes"},
    "debug/layers.py": {"_layers"},
    "integrations/transformers.py": {"handle", "waiting"},  # Modules until a model is called.
    "planner/rates.py": {"_assumed", "_known"},  # Rates of machines, by mesh.
    "runtime/context.py": {"_contexts"},  # A mesh's context, by mesh.
    "styles/base.py": {"_classes"},  # Classes made, by style and class.
}
"""What the package remembers outside any object of the user's, by file."""

UNCHANGING = {
    "Handed",
    "MatmulRule",
    "Struct",
    "Surroundings",
    "Transport",
    "_Names",
    "field",
    "frozenset",
    "getLogger",
}
"""What is called to make a value that nobody writes into."""


def _kept(tree: ast.Module) -> Iterator[str]:
    """Names at the top of a module or class that hold something which can be written into.

    A table that is annotated as a Mapping is not: mypy refuses to write into it.
    """
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    displays = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
        name, value = ast.unparse(target), node.value
        table = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation)[:8] == "Mapping["
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1]
        if isinstance(value, displays) and not table and name != "__all__":
            yield name
        elif made and made not in UNCHANGING:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"cls"} | imported:
                yield node.attr


def test_what_the_package_remembers_is_known() -> None:
    """State of a step has its place in a :class:`~torch_tp2d.runtime.context.Context`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in _kept(ast.parse(path.read_text())):
            found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    # Debug mode sets it from outside.
    assert found.pop("debug/switch.py") == {"watch"}
    found["comm/pending.py"] = {"watch"}
    assert found == STATE
