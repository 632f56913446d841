"""Which modules compute dropout in their own code, told by reading that code.

A mode that sees each call of torch costs more than a small operation does, so only those modules
run under an :class:`~torch_tp2d.styles.intercept.Intercept` whose code refers to a function that
drops: in the module's forward, in methods of it, or in functions that these refer to, by whatever
name. Only while the rates that it reads there from the module are 0 does it run without one.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from .intercept import RATES, Intercept
from .masks import Masks
from .module_kinds import forward_of

__all__ = ["CodeReader", "Drops", "OwnDropout"]

_OWN_PACKAGE = __name__.partition(".")[0]
_NOT_FOLLOWED = "torch", _OWN_PACKAGE


class Drops(NamedTuple):
    """How a module's own code drops.

    Args:
        rates: dotted names of the module's attributes that are rates, or hold one as ``p``.
        always: whether there are other rates, so that the attributes do not tell that all are 0.
    """

    rates: tuple[str, ...] = ()
    always: bool = False

    def may(self, module: nn.Module) -> bool:
        """Whether a module drops in training by the present values of its attributes."""
        return self.always or any(_rate(module, name) for name in self.rates)


def _rate(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return getattr(module, "p", module)


class CodeReader:
    """Reads the code of modules, that of each class once."""

    def __init__(self) -> None:
        self._of_classes: dict[type, Drops | None] = {}

    def drops_of(self, module: nn.Module) -> Drops | None:
        """How the module's own code drops; None if it refers to no function that does."""
        kind = type(module)
        if any(_is_function(value) for value in vars(module).values()):
            return _read(module)
        if kind not in self._of_classes:
            self._of_classes[kind] = _read(module)
        return self._of_classes[kind]


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | functools.partial) or _drops(value)


def _drops(value: Any) -> bool:
    try:
        return callable(value) and value in RATES
    except TypeError:  # It cannot be hashed.
        return False


def _read(module: nn.Module) -> Drops | None:
    reading = _Reading(module)
    reading.method("forward")
    for value in vars(module).values():
        while isinstance(value, functools.partial):
            value = value.func
        if _drops(value):
            reading.always = True
        elif isinstance(value, MethodType) and isinstance(value.__func__, FunctionType):
            reading.function(value.__func__, value.__self__ is module)
        elif isinstance(value, FunctionType):
            reading.function(value, False)
    return reading.result()


class OwnDropout:
    """Dropout in the code of a module, or of modules inside it, that runs on local tensors."""

    def __init__(self, module: nn.Module, masks: Masks) -> None:
        reader = CodeReader()
        self._drops = any(
            reader.drops_of(inner) is not None
            for inner in module.modules()
            if forward_of(inner) is not nn.Dropout.forward
        )
        self._masks = masks

    def replacing(
        self, forward: Callable[..., Any], module: nn.Module, masks: Masks | None = None
    ) -> Callable[..., Any]:
        """``forward``, with the dropout in it replaced by that of the masks."""
        if not module.training or not self._drops:
            return forward
        masks = self._masks if masks is None else masks

        def run(*args: Any, **kwargs: Any) -> Any:
            with Intercept(masks.drop, masks.attention, masks.here):
                return forward(*args, **kwargs)

        return run


class _Reading:
    """What was read so far of the code of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._kinds = [
            kind
            for kind in type(module).__mro__
            if issubclass(kind, nn.Module)
            and kind is not nn.Module
            and kind.__module__.partition(".")[0] != _OWN_PACKAGE
        ]
        self.rates: set[str] = set()
        self.always = False
        self.handed: set[str] = set()
        """Parameters of functions that are rates there, which the functions' callers know."""
        self.told: set[str] = set()
        """Keywords by which rates are passed."""
        self._seen: set[CodeType] = set()

    def result(self) -> Drops | None:
        always = self.always or not self.handed <= self.told
        return Drops(tuple(sorted(self.rates)), always) if self.rates or always else None

    def method(self, name: str) -> None:
        """Read a method, and what it is in the classes above, which it may call by ``super()``."""
        for kind in self._kinds:
            found = vars(kind).get(name)
            found = found.fget if isinstance(found, property) else found
            found = getattr(found, "__func__", found)
            if isinstance(found, FunctionType):
                self.function(found, True)
                if "super" not in _names(found.__code__):
                    return

    def function(self, function: FunctionType, own: bool) -> None:
        """Read a function. In one of the module's ``own`` methods the first argument is it."""
        code = function.__code__
        if code in self._seen:
            return
        self._seen.add(code)
        names = _names(code)
        known = _Known(function, names)
        for value in known.closure.values():
            # A decorator keeps the method that it replaces there.
            if isinstance(value, FunctionType) and _is_followed(value):
                self.function(value, own)
        if own:
            for name in names - {"forward"}:
                self.method(name)
        for value in known.referred():
            if isinstance(value, FunctionType) and _is_followed(value):
                self.function(value, False)
        if _passes_rates(code) or any(map(_drops, known.referred())):
            tree = _tree(code)
            if tree is None:
                self.always = True
            else:
                known.imported = _imports(tree)
                self._calls(tree, known, own)

    def _calls(self, tree: ast.AST, known: _Known, own: bool) -> None:
        rates = _RatesIn(self, tree, known, own)
        called = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and not _drops(known.meant(node.func)):
                for keyword in node.keywords:
                    if keyword.arg is not None and "dropout" in keyword.arg:
                        self.told.add(keyword.arg)
                        rates.add(keyword.value)
            elif isinstance(node, ast.Name | ast.Attribute) and _drops(known.meant(node)):
                call = called.get(id(node))
                if call is None:
                    self.always = True
                else:
                    rates.add_call(call, *RATES[known.meant(node)])


class _RatesIn:
    """Finds what the rates in one function come from."""

    def __init__(self, reading: _Reading, tree: ast.AST, known: _Known, own: bool) -> None:
        self._reading, self._tree = reading, tree
        code = known.function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        self._parameters = code.co_varnames[:count]
        self._self = self._parameters[0] if own and self._parameters else None
        self._assigned: set[str] = set()

    def add_call(self, call: ast.Call, place: int, name: str, default: float) -> None:
        """Add the rate of a call, which is its argument at this place or of this name."""
        given = [keyword.value for keyword in call.keywords if keyword.arg == name]
        unclear = any(keyword.arg is None for keyword in call.keywords)
        unclear = unclear or any(isinstance(arg, ast.Starred) for arg in call.args)
        if not given and len(call.args) > place:
            given = [call.args[place]]
        if not given:
            self._reading.always |= unclear or bool(default)
        for value in given:
            self.add(value)

    def add(self, value: ast.AST) -> None:
        reading = self._reading
        path = _path(value)
        if isinstance(value, ast.Constant):
            reading.always |= bool(value.value)
        elif isinstance(value, ast.IfExp):
            self.add(value.body)
            self.add(value.orelse)
        elif self._self is not None and path[:1] == [self._self] and len(path) > 1:
            reading.rates.add(".".join(path[1:]))
        elif isinstance(value, ast.Name) and value.id in self._assigned:
            return
        elif isinstance(value, ast.Name) and (values := list(self._values_of(value.id))):
            self._assigned.add(value.id)
            for one in values:
                self.add(one)
        elif isinstance(value, ast.Name) and value.id in self._parameters:
            reading.handed.add(value.id)
        else:
            reading.always = True

    def _values_of(self, name: str) -> Iterator[ast.AST]:
        """What the function sets a local variable to; nothing where that is not said plainly."""
        stores = 0
        values = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                stores += 1
            if isinstance(node, ast.Assign) and [_path(t) for t in node.targets] == [[name]]:
                values.append(node.value)
        if stores == len(values) and name not in self._parameters:
            yield from values


class _Known:
    """What the names in a function mean, as far as that is known before it runs."""

    def __init__(self, function: FunctionType, names: set[str]) -> None:
        self.function = function
        self._names = names
        self.closure = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self.closure[name] = cell.cell_contents
            except ValueError:  # It is empty still.
                continue
        self.imported: Mapping[str, Any] = {}
        self._local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}

    def referred(self) -> Iterator[Any]:
        """What the code may refer to: by a name, or by one in a module of that name."""
        env: Mapping[str, Any] = {**self.function.__globals__, **self.closure}
        found = [env[name] for name in self._names if name in env]
        # The modules that it imports itself.
        found += [sys.modules[name] for name in self._names if name in sys.modules]
        seen = set()
        while found:
            value = found.pop()
            yield value
            if isinstance(value, ModuleType) and id(value) not in seen:
                seen.add(id(value))
                found += [vars(value)[name] for name in self._names if name in vars(value)]

    def meant(self, node: ast.AST) -> Any:
        """What a name, or an attribute of a module, refers to; None where that is not known."""
        if isinstance(node, ast.Attribute):
            base = self.meant(node.value)
            return vars(base).get(node.attr) if isinstance(base, ModuleType) else None
        if not isinstance(node, ast.Name):
            return None
        if node.id in self._local:
            return self.imported.get(node.id)
        return self.closure.get(node.id, self.function.__globals__.get(node.id))


def _imports(tree: ast.AST) -> dict[str, Any]:
    """What a function's own import statements give names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.name if one.asname else one.name.partition(".")[0]
                found[one.asname or name] = sys.modules.get(name)
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                home = sys.modules.get(node.module or "")
                found[one.asname or one.name] = getattr(home, one.name, None)
    return found


def _is_followed(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED


def _names(code: CodeType) -> set[str]:
    """The global names and attributes in a function, those of functions inside it too."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _passes_rates(code: CodeType) -> bool:
    """Whether there is a call with a keyword that names dropout, of whatever function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and _passes_rates(constant):
            return True
        if isinstance(constant, tuple) and any("dropout" in str(name) for name in constant):
            return True
    return False


def _tree(code: CodeType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _path(node: ast.AST) -> list[str]:
    """``["self", "config", "rate"]`` of ``self.config.rate``; empty for another expression."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return [node.id, *path] if isinstance(node, ast.Name) else []
