"""What a Python function can read beside its arguments: the tensors, the numbers, and all else that tells two apart.

Functions that are made anew for each batch have the same code and other tensors.  What is found here says without a
trace whether an earlier one serves: the same `skeleton` and `numbers`, and tensors in the same places.
"""

from __future__ import annotations

import abc
import builtins
import collections.abc
import dataclasses
import dis
import enum
import functools
import gc
import inspect
import sys
import types
import typing
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from flashgen.lang.declare import RESERVED
from flashgen.lang.ranges import INT32_MAX, INT32_MIN

#: Modules whose contents nobody changes.
_SETTLED = frozenset({"torch", "numpy", "flashgen", *sys.stdlib_module_names}) - {"__main__"}

#: Of those, what is another thing each time.
_CHANGING = frozenset({"datetime", "os", "random", "secrets", "sys", "time", "uuid"})

#: Names of what reads by names that no code has, or of what changes by itself.
_UNSEEN = frozenset(
    {"getattr", "hasattr", "vars", "globals", "locals", "eval", "exec", "__dict__", "random"}
    | {"attrgetter", "methodcaller"}
    # PyTorch's modes, which a context turns on and off.
    | {"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype"}
    | {"get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled"}
)

#: Methods that no mask and no score has a use for.
_UNCALLED = frozenset({"__del__", "__repr__", "__str__", "__hash__"})

#: Methods that make an object, which no operation on one calls.
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})

#: Names by which code comes from an object to its class, and may make another.
_OF_A_CLASS = frozenset({"type", "__class__", "replace"})

#: What a name is taken for as it is.
_PLAIN = (str, bytes, type(None), type(Ellipsis), complex, torch.dtype, torch.device, torch.Size)

#: Containers that are what they hold.
_CONTAINERS = (list, tuple, dict, OrderedDict, Counter, defaultdict, set, frozenset)


@dataclasses.dataclass
class _Made:
    x: list[int] = dataclasses.field(default_factory=list)


#: What is the default of an argument of a data class where a function makes it.
_FACTORY = type(inspect.signature(_Made).parameters["x"].default)

#: Classes of settled modules whose methods read nothing of an object but what the walk looks at: what a container
#: holds, attributes by the names of code, and methods.
_TRANSPARENT = (
    *(*_CONTAINERS, int, float, str, bytes, object),
    *(abc.ABC, typing.Generic, typing.Protocol, types.SimpleNamespace, nn.Module, _FACTORY),
    *(getattr(collections.abc, name) for name in collections.abc.__all__),
)

#: What the class of a named tuple has by the name of a field.
_FIELD = type(typing.NamedTuple("_", [("x", int)]).x)  # type: ignore[attr-defined]

#: What a search through objects that no walk looks into ends at, and how many it looks at.
_ENDS = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, torch.Tensor)
_MOST_REFERENTS = 1024

_names: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()
_imports: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()
_outside: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()
_opaque: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class Captures:
    """What functions can read, found by a walk over closures, globals, defaults, containers and objects.

    skeleton  code (held weakly), types, texts, and where tensors, by dtype and number of dimensions, and numbers stand
    numbers   the numbers with their names, in the order of the walk
    tensors   the tensors with their names: each object once
    params    numbers that became parameters, by who holds them and their name there: (the parameter's name, the value)
    readers   the functions that read these
    kept      functions that read wanted numbers and whose results functools.lru_cache keeps, by the number's name
    settled   False where something was met that says nothing about itself
    """

    def __init__(self, functions: Iterable[Any], names: Sequence[str] = (), _inside: frozenset[int] = frozenset()):
        self.skeleton: list[Any] = []
        self.numbers: list[tuple[str, Any]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.params: dict[tuple[int, str], tuple[str, int | float]] = {}
        self.readers: dict[tuple[int, str], list[types.FunctionType]] = {}
        self.kept: dict[str, Any] = {}
        self.settled = True
        self._reader: types.FunctionType | None = None
        self._wanted = frozenset(names)
        self._inside = _inside  # what keeps results, whose functions this walk is about
        self._taken: set[str] = set()
        self._seen: dict[int, int] = {}
        self._read: set[str] = set()
        self._objects: list[tuple[Any, set[str]]] = []
        for function in functions:
            self._visit(function, getattr(function, "__name__", "function"))
        self._attributes()
        for name in sorted(self._wanted):
            self.skeleton.append(name)

    def reads(self, *names: str) -> bool:
        """Whether code that was met has one of these names, of a global or an attribute."""
        return not self._read.isdisjoint(names)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.skeleton)

    def alike(self, other: Captures) -> bool:
        """Whether another walk found the same, tensors too."""
        mine, theirs = ([x for _, x in found.tensors] for found in (self, other))
        same = len(mine) == len(theirs) and all(x is y for x, y in zip(mine, theirs, strict=True))
        return same and self.skeleton == other.skeleton and self.numbers == other.numbers

    # -----------------------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, name: str, holder: int | None = None) -> None:
        add = self.skeleton.append
        value = value.item() if isinstance(value, np.generic) else value
        kind = type(value)
        if kind in (int, float, bool):
            self._number(value, name, holder)
            return
        if isinstance(value, enum.Enum):
            self._member(value, name)
            return
        if isinstance(value, _PLAIN):
            add(tuple(value) if isinstance(value, torch.Size) else value)
            of_its_own = kind not in (str, bytes) and isinstance(value, (str, bytes))
            if of_its_own and self._is_new(value):
                self._object(value)
            return
        if not self._is_new(value):
            add(("again", self._seen[id(value)]))
            return
        if issubclass(kind, torch.Tensor):  # and no traced value that was kept
            add((weakref.ref(kind), value.dtype, value.dim(), value.device))
            self.tensors.append((self._named(name), value))
            if value.__dict__ or kind not in (torch.Tensor, nn.Parameter):
                self._objects.append((value, set()))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            add("method")
            self._visit(value.__self__, name)
            self._visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            add("partial")
            self._visit(value.func, name)
            self._items(value.args, name)
            self._mapping(value.keywords)
        elif isinstance(value, (list, tuple)):
            self._items(tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value), name)
            self._container(value)
        elif isinstance(value, dict):
            self._mapping(value)
            self._container(value)
        elif isinstance(value, (set, frozenset)):
            if all(type(x) in (int, str) for x in value):
                add(frozenset(value))
            else:
                self.settled = False  # elements have no order to look at them in
                self._keepers(value)
            self._container(value)
        elif isinstance(value, types.ModuleType):
            add(value.__name__)
            self.settled &= not _changes(value.__name__)
            if not settled(value.__name__):
                self._objects.append((value, set()))
                self._visit(value.__dict__.get("__getattr__"), "__getattr__")
                self._operators(kind, _UNCALLED | _MAKING)
        elif isinstance(value, type):
            self._type(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            self._builtin(value, name)
        else:
            self._object(value)

    def _is_new(self, value: Any) -> bool:
        """Whether a value is met for the first time; it has a number from then on."""
        return self._seen.setdefault(id(value), count := len(self._seen)) == count

    def _member(self, value: enum.Enum, name: str) -> None:
        """A member of an enumeration: its name, and of one of the user's what it stands for and what is read of it."""
        self.skeleton.append((weakref.ref(type(value)), value.name))
        if not settled(type(value).__module__) and self._is_new(value):
            self._objects.append((value, set()))
            self._visit(value._value_, name)
            self._operators(type(value), _UNCALLED | _MAKING)

    def _container(self, value: Any) -> None:
        """What a list, a tuple, a dict or a set is beside what it holds."""
        kind = type(value)
        if kind in _CONTAINERS or (settled(kind.__module__) and isinstance(value, tuple)):  # those that torch returns
            self.skeleton.append(kind)
            if kind is defaultdict:
                self._visit(value.default_factory, "default_factory")
        else:
            self._object(value)

    def _number(self, value: Any, name: str, holder: int | None) -> None:
        if name in self._wanted and holder is not None and type(value) is not bool:
            if (holder, name) not in self.params:
                self.params[holder, name] = self._named(name), value
            if self._reader is not None:
                self.readers.setdefault((holder, name), []).append(self._reader)
            self.skeleton.append(("param", self.params[holder, name][0], type(value), is_wide(value)))
            return
        self.skeleton.append(type(value))
        self._told(name, value)

    def _told(self, name: str, value: float) -> None:
        """A number as others are compared with it."""
        # -0.0 is 0.0, and no NaN is itself: texts of floats tell all apart that differ.
        self.numbers.append((name, value.hex() if type(value) is float else value))

    def _items(self, values: Iterable[Any], name: str) -> None:
        values = tuple(values)
        self.skeleton.append(len(values))
        for i, value in enumerate(values):
            self._visit(value, f"{name}_{i}")

    def _mapping(self, values: dict[Any, Any]) -> None:
        """What a dict holds, whatever its class says of that."""
        self.skeleton.append(dict.__len__(values))
        # An OrderedDict has an order of its own.
        for key, value in OrderedDict.items(values) if isinstance(values, OrderedDict) else dict.items(values):
            self._visit(key, "key")
            self._visit(value, key if isinstance(key, str) else "value")

    def _function(self, function: types.FunctionType) -> None:
        reader, self._reader = self._reader, function
        self._read_by(function)
        self._reader = reader

    def _read_by(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.skeleton.append(weakref.ref(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                self.skeleton.append("empty")
                continue
            self._visit(value, name, id(cell))
        if function.__defaults__:
            arguments = code.co_varnames[: code.co_argcount]
            for name, value in zip(arguments[-len(function.__defaults__) :], function.__defaults__, strict=True):
                self._visit(value, name, id(function))
        for name, value in (function.__kwdefaults__ or {}).items():
            self._visit(value, name, id(function))
        self.settled &= not _changes(function.__module__ or "")
        if not settled(function.__module__ or ""):
            names = names_of(code)
            self._read.update(names)
            self.settled &= _UNSEEN.isdisjoint(names) and not imports(code)
            if function.__dict__:
                self._objects.append((function, set()))
            scope = function.__globals__
            for name in names:
                if name in scope:
                    self._visit(scope[name], name, id(scope))
                elif not hasattr(builtins, name):
                    self.skeleton.append("absent")  # or an attribute's name

    def _builtin(self, value: Any, name: str) -> None:
        own = getattr(value, "__self__", None)
        self.settled &= not _changes(getattr(value, "__module__", None) or "")
        if own is None or isinstance(own, (types.ModuleType, type)):
            self.skeleton.append(value)
        else:
            self.skeleton.append(value.__name__)
            self._visit(own, name)

    def _type(self, value: type) -> None:
        self.skeleton.append(weakref.ref(value))
        if settled(value.__module__):
            return
        self._objects.append((value, set()))
        self._operators(type(value), _UNCALLED | _MAKING)
        self._operators(value, _UNCALLED)  # the function may make an object of it
        if issubclass(value, nn.Module):
            self._methods(value, "forward")
        if issubclass(value, torch.autograd.Function):
            for name in ("forward", "setup_context"):
                self._visit(inspect.getattr_static(value, name).__func__, name)

    def _object(self, value: Any) -> None:
        kind, module = type(value), isinstance(value, nn.Module)
        self.skeleton.append(weakref.ref(kind))
        if isinstance(value, (int, float)):  # of a class of its own
            self._told(kind.__name__, int.__pos__(value) if isinstance(value, int) else float.__pos__(value))
        if kind.__module__ == "torch._ops":
            self.skeleton.append(str(value))
            return
        opaque = _is_opaque(kind)
        asked = getattr(kind, "__getattr__", None)
        answers = isinstance(kind.__getattribute__, types.FunctionType) or (
            asked not in (None, dict.__getitem__, dict.get) and not module
        )
        if answers or (opaque and not module):
            self.settled = False
            self._keepers(value)
            return
        if module and opaque:  # torch's own code, which no walk looks into, reads these
            plain = {name: x for name, x in value.__dict__.items() if isinstance(x, (bool, int, float, str))}
            for held in (plain, value._modules, value._parameters, value._buffers):
                self._mapping(held)
        self._objects.append((value, set()))
        if module:
            self._methods(kind, "forward")
            for hooks in (value._forward_pre_hooks, value._forward_hooks):
                self._items(hooks.values(), "hook")
        self._operators(kind, _UNCALLED | _MAKING)

    def _keepers(self, value: Any) -> None:
        """What functools.lru_cache keeps of functions that read wanted numbers, in an object that no walk looks into:
        such a function may not run while others are traced, so that nobody would notice it."""
        within = [value] if self._wanted else []
        seen = set(self._inside)
        while within and len(seen) < _MOST_REFERENTS:
            one = within.pop()
            if id(one) in seen or issubclass(type(one), _ENDS):
                continue
            seen.add(id(one))
            if isinstance(one, functools._lru_cache_wrapper):
                inside = Captures((one.__wrapped__,), tuple(self._wanted), self._inside | {id(one)})
                self.kept.update({name: one.__wrapped__ for _, name in inside.params} | inside.kept)
            else:
                within.extend(gc.get_referents(one))

    def _operators(self, kind: type, uncalled: frozenset[str]) -> None:
        """The methods of a class that Python calls where code has no name of them, but for those `uncalled`."""
        for own in (c for c in kind.__mro__ if not settled(c.__module__)):
            for name, method in list(own.__dict__.items()):
                method = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
                if name.startswith("__") and name not in uncalled and callable(method):
                    self._visit(method, name)

    def _methods(self, kind: type, name: str) -> bool:
        """What a class and those that it is made of have by a name; whether one has it."""
        found = [own.__dict__[name] for own in kind.__mro__ if name in own.__dict__ and not settled(own.__module__)]
        for one in found:
            if isinstance(one, property):
                self._visit(one.fget, name)
            elif isinstance(one, (staticmethod, classmethod)):
                self._visit(one.__func__, name)
            elif not isinstance(one, (types.MemberDescriptorType, _FIELD)):
                self._visit(one, name)
        return bool(found)

    def _attributes(self) -> None:
        """What the code that was met can read of the objects that were: by its names of attributes."""
        count = -1
        while count != len(self.skeleton):
            count = len(self.skeleton)
            for value, done in list(self._objects):
                for name in sorted(self._read - done):
                    done.add(name)
                    self._attribute(value, name)

    def _attribute(self, value: Any, name: str) -> None:
        if isinstance(value, type):
            if any([self._methods(value, name), self._methods(type(value), name)]):
                self.skeleton.append(name)
            return
        if name in _OF_A_CLASS:
            self._visit(type(value), name)
        own = getattr(value, "__dict__", {})
        places = [own]
        if isinstance(value, nn.Module):
            places += [own["_parameters"], own["_buffers"], own["_modules"]]
        for place in places:
            if name in place:
                self.skeleton.append(name)
                self._visit(place[name], name)
                return
        if isinstance(value, (types.ModuleType, types.FunctionType)):
            return
        slot = inspect.getattr_static(type(value), name, None)
        if isinstance(slot, types.MemberDescriptorType):
            self.skeleton.append(name)
            self._visit(getattr(value, name, None), name)
        elif self._methods(type(value), name):
            self.skeleton.append(name)

    def _named(self, name: str) -> str:
        """A name that the language takes, which no other has."""
        plain = name
        if not (name.isascii() and name.isidentifier()):
            plain = "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))
        plain = plain.lstrip("_0123456789") or "captured"
        plain = f"{plain}_" if plain in RESERVED else plain
        unique, count = plain, 1
        while unique in self._taken:
            count += 1
            unique = f"{plain}_{count}"
        self._taken.add(unique)
        return unique


def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that code reads, and the code inside of it."""
    found = _names.get(code)
    if found is None:
        inside = (names_of(c) for c in code.co_consts if isinstance(c, types.CodeType))
        # A pattern of a class has its names of attributes in a tuple.
        of_patterns = (c for c in code.co_consts if isinstance(c, tuple) and all(isinstance(x, str) for x in c))
        found = _names[code] = tuple(sorted(set(code.co_names).union(*inside, *of_patterns)))
    return found


def read_outside(code: types.CodeType) -> frozenset[str]:
    """The names of globals and of variables of functions around it that code itself reads."""
    found = _outside.get(code)
    if found is None:
        steps = dis.get_instructions(code)
        of_globals = (step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        found = _outside[code] = frozenset(of_globals).union(code.co_freevars)
    return found


def imports(code: types.CodeType) -> bool:
    """Whether code imports what another import may replace, or the code inside of it does."""
    found = _imports.get(code)
    if found is None:
        steps = list(dis.get_instructions(code))
        found = _imports[code] = any(
            step.opname == "IMPORT_NAME"
            and (steps[i - 2].argval != 0 or not settled(step.argval) or _changes(step.argval))
            for i, step in enumerate(steps)
        ) or any(imports(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return found


def is_wide(number: int | float) -> bool:
    """Whether an integer needs 64 bits."""
    return isinstance(number, int) and not INT32_MIN <= number <= INT32_MAX


def _is_opaque(kind: type) -> bool:
    """Whether methods of a class, which no walk looks into, may read what no name of code says."""
    found = _opaque.get(kind)
    if found is None:
        bases = (own for own in kind.__mro__ if own not in _TRANSPARENT)
        found = _opaque[kind] = any(settled(own.__module__) for own in bases)
    return found


def settled(module: str) -> bool:
    """Whether a module is one whose contents nobody changes."""
    return module.split(".")[0] in _SETTLED


def _changes(module: str) -> bool:
    return module.split(".")[0] in _CHANGING


def _holds(value: Any) -> bool:
    """Whether a value is a function or may hold some, as `replaced` finds them."""
    callables = isinstance(value, (types.FunctionType, types.MethodType, functools.partial))
    return callables or type(value) in (list, tuple, dict)


def replaced(value: Any, by: Mapping[tuple[int, str], Any], done: dict[int, Any] | None = None) -> Any:
    """A function, or what holds functions, with others in place of numbers that it reads: by who holds them and their
    name there, as `Captures.params` has them.  `done` becomes what stands for each function that was reached, by its
    id; a method of an object that a function asks for is not."""
    done = {} if done is None else done
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, types.FunctionType):
        return _replaced_function(value, by, done)
    if isinstance(value, types.MethodType):
        return types.MethodType(replaced(value.__func__, by, done), value.__self__)
    if type(value) is tuple:
        return tuple(replaced(x, by, done) for x in value)
    if type(value) is list:
        items: list[Any] = []
        done[id(value)] = items
        items.extend(replaced(x, by, done) for x in value)
        return items
    if type(value) is dict:
        done[id(value)] = made = {}
        made.update({key: replaced(x, by, done) for key, x in value.items()})
        return made
    if isinstance(value, functools.partial):
        arguments = [replaced(x, by, done) for x in value.args]
        named = {name: replaced(x, by, done) for name, x in value.keywords.items()}
        return functools.partial(replaced(value.func, by, done), *arguments, **named)
    return value


def called(value: Any) -> Any:
    """What runs where a mask or score is called: of an object its method."""
    call = inspect.getattr_static(type(value), "__call__", None)
    plain = isinstance(value, (types.FunctionType, types.MethodType, functools.partial, nn.Module))
    return value if plain or not isinstance(call, types.FunctionType) else types.MethodType(call, value)


def _replaced_function(
    function: types.FunctionType, by: Mapping[tuple[int, str], Any], done: dict[int, Any]
) -> types.FunctionType:
    """A function that is made first, with cells and globals of its own where they change, and filled then: what it
    reads may be itself, or read it."""
    code, scope = function.__code__, function.__globals__
    cells: list[types.CellType] = []
    filling: list[tuple[types.CellType, Any]] = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        own = cell
        try:
            if (id(cell), name) in by:
                own = types.CellType(by[id(cell), name])
            elif _holds(cell.cell_contents):
                own = types.CellType()
                filling.append((own, cell.cell_contents))
        except ValueError:  # empty yet
            pass
        cells.append(own)
    changed = {name: by[id(scope), name] for name in names_of(code) if (id(scope), name) in by}
    helpers: list[str] = []
    if not settled(function.__module__ or ""):
        helpers = [name for name in names_of(code) if _holds(scope.get(name)) and name not in changed]
    own_scope = {**scope, **changed} if changed or helpers else scope
    made = types.FunctionType(code, own_scope, function.__name__, None, tuple(cells))
    done[id(function)] = made
    for empty, value in filling:
        empty.cell_contents = replaced(value, by, done)
    for name in helpers:
        own_scope[name] = replaced(scope[name], by, done)
    arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    given = list(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))

    def default(name: str, value: Any) -> Any:
        return by[id(function), name] if (id(function), name) in by else replaced(value, by, done)

    made.__defaults__ = tuple(default(name, value) for name, value in given) or None
    made.__kwdefaults__ = {name: default(name, value) for name, value in (function.__kwdefaults__ or {}).items()}
    made.__module__, made.__doc__ = function.__module__, function.__doc__
    return made
