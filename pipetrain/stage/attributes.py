"""What a forward changes in plain Python: counters, caches, tensors in attributes, generators of a layer's own.

`Attributes` walks over what can be reached from some objects and notes each thing that can be changed: a namespace, a
list, a dict, a set, a tensor, a generator. Contents are noted one level deep, so that things keep their identity when they
are put back.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.stage.tensor_copies import Storages, TensorCopies, is_small, version_of

# A longer list or dict is copied as a whole, and its entries are not looked into.
_MANY = 64
_DEEPEST = 6

_ATOMS = frozenset(
    (
        types.NoneType,
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
# Of nn.Module itself: not state of a layer. Buffers are copied by themselves, but who is a buffer is looked at here.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_buffers"}
_NOT_LOOKED_INTO = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pipetrain", "torchvision", "functorch"}


class StateChanged(RuntimeError):
    """A forward changes something that a recompute can neither see as it was nor leave as it is."""


class Attributes:
    """The mutable things that can be reached from `roots`, with their contents at this moment.

    `known` are the identities of things that are looked after elsewhere (the modules of the stage, their buffers). Of large
    tensors those with an identity in `large` are copied; None: all. `storages` are the copies of memory made so far.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        known: Container[int] = (),
        large: Container[int] | None = (),
        storages: Storages | None = None,
    ) -> None:
        self._notes: list[_Note] = []
        self._known = known
        self._seen: set[int] = set()
        self._large = large
        self._storages = storages
        for name, root in roots:
            self._note_root(name, root)

    def changed(self) -> list[str]:
        """The names of what differs now."""
        return [name for note in self._notes for name in note.changed()]

    def changed_tensors(self) -> list[Tensor]:
        """Tensors in attributes that were changed in place."""
        return [note.tensor for note in self._notes if isinstance(note, _TensorNote) and note.changed()]

    def settle(self) -> None:
        """F has ended: of large tensors in attributes only those are held on to that F has left where they were.

        Raises:
            StateChanged: F changed one in place that was not copied.
        """
        for note in self._notes:
            note.settle()

    def stand_in(self) -> Callable[[], None]:
        """Everything is as it was; returns what undoes that."""
        undo = [note.stand_in() for note in self._notes]

        def withdraw() -> None:
            for step in reversed(undo):
                step()

        return withdraw

    def put_back(self) -> None:
        for note in self._notes:
            note.put_back()

    def _note_root(self, name: str, root: Any) -> None:
        if isinstance(root, nn.Module):
            self._note_namespace(name, vars(root), root, _OF_MODULES, 0)
        elif isinstance(root, type):
            self._note_class(name, root)
        else:
            self._look(name, root, 0)

    def _look(self, name: str, thing: Any, depth: int) -> None:
        """Note `thing` if it can be changed, and look at what it leads to."""
        key = id(thing)
        if type(thing) in _ATOMS or key in self._seen or key in self._known or depth > _DEEPEST:
            return
        self._seen.add(key)
        for kinds, note in _HOW:
            if isinstance(thing, kinds):
                note(self, name, thing, depth)
                return
        access = _generator_access(thing)
        if access is not None:
            self._notes.append(_Generator(name, thing, *access))
        elif is_of_the_user(type(thing)) and hasattr(thing, "__dict__"):
            self._note_namespace(name, vars(thing), thing, frozenset(), depth)

    def _note_tensor(self, name: str, tensor: Tensor, depth: int) -> None:  # noqa: ARG002
        if _is_own_tensor(tensor):
            copied = is_small(tensor) or self._large is None or id(tensor) in self._large
            self._notes.append(_TensorNote(name, tensor, copied, self._storages))

    def _note_tuple(self, name: str, items: tuple[Any, ...], depth: int) -> None:
        self._look_at_all(((f"{name}[{n}]", item) for n, item in enumerate(items)), len(items), depth)

    def _note_dict(self, name: str, items: dict[Any, Any], depth: int) -> None:
        self._notes.append(_Contents(name, items, _DictAccess))
        self._look_at_all(((f"{name}[{key!r}]", item) for key, item in items.items()), len(items), depth)

    def _note_list(self, name: str, items: Sequence[Any], depth: int) -> None:
        self._notes.append(_Contents(name, items, _ListAccess))
        self._look_at_all(((f"{name}[{n}]", item) for n, item in enumerate(items)), len(items), depth)

    def _note_set(self, name: str, items: set[Any], depth: int) -> None:  # noqa: ARG002, its items cannot change
        self._notes.append(_Contents(name, items, _SetAccess))

    def _note_method(self, name: str, method: types.MethodType, depth: int) -> None:
        self._look(name, method.__self__, depth)
        self._look(name, method.__func__, depth)

    def _note_partial(self, name: str, call: partial[Any], depth: int) -> None:
        for part in (call.func, call.args, call.keywords):
            self._look(name, part, depth)

    def _note_module(self, name: str, module: nn.Module, depth: int) -> None:
        """One that is no part of the stage, or hidden from torch in a list."""
        self._note_namespace(name, vars(module), module, _OF_MODULES, depth)
        for buffer in module._buffers.values():
            self._look(f"{name}.{buffer}", buffer, depth)
        for child_name, child in module.named_children():
            self._look(f"{name}.{child_name}", child, depth)

    def _look_at_all(self, named: Iterable[tuple[str, Any]], count: int, depth: int) -> None:
        if count <= _MANY:
            for name, item in named:
                self._look(name, item, depth + 1)

    def _note_namespace(
        self, name: str, names: dict[str, Any], owner: Any, without: frozenset[str], depth: int
    ) -> None:
        self._seen.add(id(owner))
        self._notes.append(_Contents(name, names, _NamespaceAccess, without))
        for key, value in names.items():
            if key == "_buffers" and isinstance(owner, nn.Module):
                self._notes.append(_Contents(name, value, _NamespaceAccess, loose=False))
            elif key not in without and type(value) not in _ATOMS:
                self._look(f"{name}.{key}", value, depth + 1)

    def _note_class(self, name: str, kind: type) -> None:
        """The attributes of a class of the user's that are data."""
        self._seen.add(id(kind))
        self._notes.append(_Contents(name, kind, _ClassAccess))
        for key, value in _data_of(kind).items():
            self._look(f"{name}.{key}", value, 1)
        for function in vars(kind).values():
            if isinstance(function, types.FunctionType):
                self._note_variables(name, function)

    def _note_variables(self, name: str, function: types.FunctionType) -> None:
        """Numbers and texts outside of the class that a method rebinds; a list or dict out there is not the layer's state."""
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if all(type(value) in _ATOMS for value in _CellAccess.read(cell).values()):
                self._notes.append(_Contents(f"{name}: {key}", cell, _CellAccess))
        names = function.__globals__
        for key in _rebound(function.__code__):
            if type(names.get(key)) in _ATOMS:
                self._notes.append(_Contents(f"{name}: {key}", _Variable(names, key), _CellAccess))

    def _note_function(self, name: str, function: types.FunctionType, depth: int) -> None:
        if not is_of_the_user(function):
            return
        if function.__dict__:
            self._note_namespace(name, function.__dict__, function, frozenset(), depth)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._notes.append(_Contents(f"{name}.{key}", cell, _CellAccess))
            for value in _CellAccess.read(cell).values():
                self._look(f"{name}.{key}", value, depth + 1)


# Contents -------------------------------------------------------------------------------------------------------------


class _Note(ABC):
    """One thing, as it was."""

    @abstractmethod
    def changed(self) -> list[str]: ...

    @abstractmethod
    def stand_in(self) -> Callable[[], None]: ...

    def put_back(self) -> None:
        self.stand_in()

    def settle(self) -> None:
        return


class _NamespaceAccess:
    @staticmethod
    def read(thing: Any) -> dict[Any, Any]:
        return dict(thing)

    @staticmethod
    def write(thing: Any, contents: dict[Any, Any]) -> None:
        thing.clear()
        thing.update(contents)

    @staticmethod
    def name(owner: str, key: Any) -> str:
        return f"{owner}.{key}"


class _DictAccess(_NamespaceAccess):
    @staticmethod
    def name(owner: str, key: Any) -> str:
        return f"{owner}[{key!r}]"


class _ListAccess(_DictAccess):
    @staticmethod
    def read(thing: Any) -> dict[Any, Any]:
        return dict(enumerate(thing))

    @staticmethod
    def write(thing: Any, contents: dict[Any, Any]) -> None:
        thing.clear()
        thing.extend(contents.values())


class _SetAccess(_DictAccess):
    @staticmethod
    def read(thing: Any) -> dict[Any, Any]:
        return dict.fromkeys(thing)

    @staticmethod
    def write(thing: Any, contents: dict[Any, Any]) -> None:
        thing.clear()
        thing.update(contents)


class _CellAccess(_NamespaceAccess):
    """A variable of an enclosing function."""

    @staticmethod
    def read(thing: Any) -> dict[Any, Any]:
        try:
            return {"": thing.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    @staticmethod
    def write(thing: Any, contents: dict[Any, Any]) -> None:
        if contents:
            thing.cell_contents = contents[""]
        else:
            del thing.cell_contents

    @staticmethod
    def name(owner: str, key: Any) -> str:  # noqa: ARG004, a cell has one variable
        return owner


@dataclass
class _Variable:
    """A global variable, read and written as a cell is."""

    names: dict[str, Any]
    key: str

    @property
    def cell_contents(self) -> Any:
        return self.names[self.key]

    @cell_contents.setter
    def cell_contents(self, value: Any) -> None:
        self.names[self.key] = value


@functools.cache
def _rebound(code: types.CodeType) -> tuple[str, ...]:
    """The global variables that a function assigns to."""
    return tuple({str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"})


class _ClassAccess(_NamespaceAccess):
    @staticmethod
    def read(thing: Any) -> dict[Any, Any]:
        return _data_of(thing)

    @staticmethod
    def write(thing: Any, contents: dict[Any, Any]) -> None:
        now = _data_of(thing)
        for key in now.keys() - contents.keys():
            delattr(thing, key)
        for key, value in contents.items():
            if now.get(key) is not value or key not in now:
                setattr(thing, key, value)


class _Contents(_Note):
    """What a container or a namespace holds. Large tensors of a namespace are held loosely until F has ended."""

    def __init__(
        self,
        name: str,
        thing: Any,
        access: type[_NamespaceAccess],
        without: frozenset[str] = frozenset(),
        *,
        loose: bool = True,
    ) -> None:
        self._name = name
        self._thing = thing
        self._access = access
        self._without = without
        contents = self._read()
        self._contents = {
            key: _Loose(value) if loose and _is_large(value) else value for key, value in contents.items()
        }

    def _read(self) -> dict[Any, Any]:
        contents = self._access.read(self._thing)
        for key in self._without:
            contents.pop(key, None)
        return contents

    def changed(self) -> list[str]:
        now, before = self._read(), self._contents
        keys = [key for key in now if key not in before]
        keys += [key for key, value in before.items() if key not in now or not _same(now[key], value)]
        if not keys and list(now) != list(before):  # another order
            return [self._name]
        return [self._access.name(self._name, key) for key in keys]

    def settle(self) -> None:
        loose = [key for key, value in self._contents.items() if type(value) is _Loose]
        if not loose:
            return
        now = self._read()
        for key in loose:
            held = self._contents[key]
            still = held.tensor is not None and now.get(key) is held.tensor
            self._contents[key] = now[key] if still else _Gone(self._access.name(self._name, key))

    def stand_in(self) -> Callable[[], None]:
        live = self._access.read(self._thing)
        left = {key: live[key] for key in self._without if key in live}
        self._access.write(self._thing, left | {key: _unpacked(value) for key, value in self._contents.items()})
        return lambda: self._access.write(self._thing, live)


class _Loose:
    """A large tensor in an attribute, not kept alive: what F puts another in the place of is gone when F has ended."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    @property
    def tensor(self) -> Tensor | None:
        return self._tensor()


@dataclass(frozen=True)
class _Gone:
    """Where a large tensor was that F put another in the place of."""

    name: str


def _unpacked(value: Any) -> Any:
    if type(value) is _Loose:
        return value.tensor
    return _NotKept.of(value.name) if type(value) is _Gone else value


class _NotKept(Tensor):
    """Stands where a tensor was that has not been kept: whatever R asks of it is refused."""

    place: str

    @staticmethod
    def of(name: str) -> _NotKept:
        tensor: _NotKept = Tensor._make_subclass(_NotKept, torch.empty(0))
        vars(tensor)["place"] = name
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = next((vars(leaf)["place"] for leaf in _flat((args, kwargs)) if isinstance(leaf, _NotKept)), "a tensor")
        raise StateChanged(
            f"{place} is read in the recompute, and each forward puts another tensor in its place, too large "
            f"(more than 64 KiB) to keep one per microbatch: make it a buffer (register_buffer), or keep the sets of this "
            "stage with recompute.mode=never"
        )


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


class _TensorNote(_Note):
    """A tensor in an attribute: its values, or, where it is not copied, its version."""

    def __init__(self, name: str, tensor: Tensor, copied: bool, storages: Storages | None) -> None:
        self._name = name
        self._copies = TensorCopies([tensor] if copied else [], storages)
        self._tensor = weakref.ref(tensor)
        self._version = version_of(tensor)

    @property
    def tensor(self) -> Tensor:
        return self._copies.tensors[0]

    def changed(self) -> list[str]:
        return [self._name] if self._copies.changed() else []

    def settle(self) -> None:
        tensor = self._tensor()
        if self._copies.tensors or tensor is None or version_of(tensor) == self._version:
            return
        raise changed_later(self._name, tensor)

    def stand_in(self) -> Callable[[], None]:
        live = self._copies.stand_in()
        return lambda: self._copies.withdraw(live)

    def put_back(self) -> None:
        self._copies.put_back()


def changed_later(name: str, tensor: Tensor) -> StateChanged:
    return StateChanged(
        f"{name}, a tensor of {list(tensor.shape)}, is changed by a forward for the first time, and was not copied before "
        "it, so that its recompute would see another value: let the first forward change it too, or keep the sets of this "
        "stage with recompute.mode=never"
    )


# Generators -----------------------------------------------------------------------------------------------------------


class _Generator(_Note):
    """A generator of random numbers: its state."""

    def __init__(self, name: str, thing: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._name = name
        self._thing = thing
        self._read = read
        self._write = write
        self._state = read()

    def changed(self) -> list[str]:
        return [] if _same_state(self._read(), self._state) else [self._name]

    def stand_in(self) -> Callable[[], None]:
        live = self._read()
        self._write(self._state)
        return lambda: self._write(live)


def _generator_access(thing: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How the state of a generator is read and written; None for what is no generator."""
    if isinstance(thing, torch.Generator):
        return thing.get_state, lambda state: _ignore(thing.set_state(state))
    if isinstance(thing, random.Random):
        return thing.getstate, thing.setstate
    if type(thing).__module__.startswith("numpy.random"):
        if hasattr(thing, "get_state"):  # RandomState
            return thing.get_state, thing.set_state
        bits = getattr(thing, "bit_generator", thing)
        if hasattr(bits, "state"):
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _ignore(_: Any) -> None:
    return


def _same_state(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_state(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_same_state, left, right))
    if hasattr(left, "tobytes"):
        return bool(left.tobytes() == right.tobytes())
    return bool(left == right)


_HOW: Sequence[tuple[Any, Callable[[Attributes, str, Any, int], None]]] = (
    (Tensor, Attributes._note_tensor),
    (tuple, Attributes._note_tuple),
    (dict, Attributes._note_dict),
    ((list, deque, bytearray), Attributes._note_list),
    (set, Attributes._note_set),
    (types.FunctionType, Attributes._note_function),
    (types.MethodType, Attributes._note_method),
    (partial, Attributes._note_partial),
    (nn.Module, Attributes._note_module),
)

# What is what ---------------------------------------------------------------------------------------------------------


def _same(now: Any, before: Any) -> bool:
    """The same thing, or an equal number or text. What a thing holds is compared where it is noted."""
    if type(before) is _Loose:
        return now is before.tensor
    if now is before:
        return True
    return type(now) is type(before) and type(now) in _ATOMS and (now == before or (now != now and before != before))


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and _is_own_tensor(value) and not is_small(value)


def _is_own_tensor(tensor: Tensor) -> bool:
    return type(tensor) is Tensor


def is_of_the_user(thing: Any) -> bool:
    """Whether a class or function may hold state of a layer: not a class of torch, of Python or of ours."""
    top = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return thing is types.SimpleNamespace or (bool(top) and top not in _NOT_LOOKED_INTO)


_NO_DATA = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    type,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


def _data_of(kind: type) -> dict[str, Any]:
    """Attributes of a class that are neither functions nor made by Python."""
    return {
        key: value
        for key, value in vars(kind).items()
        if not (key.startswith("__") and key.endswith("__"))
        and not isinstance(value, _NO_DATA)
        and not key.startswith("_abc_")
    }


def classes_of(module: nn.Module) -> list[type]:
    """The classes of a module that the user wrote."""
    return [kind for kind in type(module).__mro__ if is_of_the_user(kind)]
