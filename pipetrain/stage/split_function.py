"""Backward in two halves: I gives the gradient of the input, W later those of the weights.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2: nobody but the optimizer waits for the second half.

    F  apply           [1] the node is told of the deferral of its microbatch, and which arguments are parameters
    I  backward        [2] `backward_input` now; what `backward_weight` needs goes into the deferral, and the node goes
    W  Deferral.run    [3] `backward_weight`; a weight's gradients are summed, then added to `.grad` once, as in B

What may not wait stays whole in I, by the same two functions.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.stage.errors import SavedTensorChanged
from pipetrain.stage.meter import ActivationMeter, storages_of

NOTE = "_note_for_w"  # the attribute of a node's ctx, and so of a node that `User.note` was told of


class SplitFunction(torch.autograd.Function):
    """An autograd function whose backward comes in two halves. A kernel of one's own is a subclass with two more static methods:

    - `backward_input(ctx, *gradients)`: as `backward`, with None for each weight;
    - `backward_weight(ctx, *gradients)`: as `backward`, with None for everything else.

    The weights are the arguments that need a gradient and get none from the first. The second may run when the graph has
    gone: of `ctx` it finds `saved_tensors`, `needs_input_grad` and whatever was set on it. `backward` need not be there: it is
    one after the other, unless a kernel has a better one.
    """

    _whole: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "backward" in vars(cls):
            cls._whole = vars(cls)["backward"]
        cls.backward = staticmethod(functools.partial(_backward, cls))  # type: ignore[method-assign]

    @staticmethod
    def backward_input(ctx: Any, *gradients: Any) -> Any:
        """What `backward` would return, with None for each weight."""
        raise NotImplementedError

    @staticmethod
    def backward_weight(ctx: Any, *gradients: Any) -> Any:
        """What `backward` would return for the weights, with None for everything else."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any, **named: Any) -> Any:
        """As for any autograd function."""
        output = super().apply(*args, **named)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling() and (user := user_in_force()) is not None and user.is_forward:
            user.note(output, args)
        return output


def _backward(function: type[SplitFunction], ctx: Any, *gradients: Tensor | None) -> Any:
    note: _Note | None = getattr(ctx, NOTE, None)
    if note is not None:
        note.user.deferral.refuse_in_forward(note)
    deferral = None if note is None else note.user.deferral
    if (deferral is None or not deferral.is_open) and hasattr(function, "_whole"):
        return function._whole(ctx, *gradients)
    given = _as_tuple(function.backward_input(ctx, *gradients))
    needed = zip(ctx.needs_input_grad, given)  # arguments with a default may have no place in the first
    weights = [place for place, (needs, gradient) in enumerate(needed) if needs and gradient is None]
    if not weights:
        return given
    if deferral is not None and note is not None and deferral.takes(note, weights):
        deferral.put_off(function, ctx, gradients, note, weights)
        return given
    late = _as_tuple(function.backward_weight(ctx, *gradients))
    return tuple(late[place] if place in weights else gradient for place, gradient in enumerate(given))


def _as_tuple(gradients: Any) -> tuple[Tensor | None, ...]:
    return gradients if isinstance(gradients, tuple) else (gradients,)


# F and R: who calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class User:
    """The layer that runs in F or R. `hooks` are those for saved tensors under which it was entered."""

    deferral: Deferral
    layer: int
    hooks: Any
    is_forward: bool

    def tell(self, why: str) -> None:
        """Its backward stays whole in I."""
        self.deferral.weights.tell(self.layer, why)

    def note(self, output: Any, args: tuple[Any, ...]) -> None:
        """The layer has applied a split function."""
        nodes = (leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        node = next((node for node in nodes if node is not None), None)
        if node is None:
            return
        parameters = {
            place: argument
            for place, argument in enumerate(args)
            if isinstance(argument, nn.Parameter) and argument.requires_grad and why_whole(argument) is None
        }
        setattr(node, NOTE, _Note(self, parameters))
        self.deferral.parameters.update((id(parameter), (parameter, self.layer)) for parameter in parameters.values())


_USER: ContextVar[User | None] = ContextVar("the layer that runs", default=None)
user_in_force = _USER.get


@contextmanager
def in_force(user: User) -> Iterator[None]:
    """While the layer runs, on this thread."""
    token = _USER.set(user)
    try:
        yield
    finally:
        _USER.reset(token)


def why_whole(weight: Tensor) -> str | None:
    """Why the gradient of `weight` may not wait for W; None: nothing that can be seen of it forbids it."""
    if type(weight) is not nn.Parameter:
        return "its weight is made from a parameter in its forward, or is one of a kind of its own"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which would run in I"
    return None


# I and W --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Note:
    """What a node knows of who made it: argument -> parameter."""

    user: User
    parameters: dict[int, nn.Parameter]


class _Context:
    """What `backward_weight` gets as its ctx in W: the node itself holds the whole graph before it."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update((name, value) for name, value in vars(ctx).items() if name != NOTE)
        # Detached, for what is the output of another node holds that node.
        self.saved_tensors = tuple(saved if saved is None else saved.detach() for saved in ctx.saved_tensors)
        self.needs_input_grad = ctx.needs_input_grad


@dataclass(frozen=True)
class _PutOff:
    """The second half of one node's backward.

    `gradients` are the very tensors that the node got: autograd takes a gradient as `.grad`, to add to it in place, where
    nobody else holds that tensor, and a view of it would not count as holding.
    """

    function: type[SplitFunction]
    context: _Context
    gradients: tuple[Tensor | None, ...]
    weights: dict[int, nn.Parameter]  # by argument
    layer: int
    held: list[tuple[Tensor, int, int]]  # what it reads: each tensor, its version and its key in the meter


class Weights(Protocol):
    """What is known of the weights of a stage."""

    def may_wait(self, parameter: nn.Parameter) -> bool:
        """Whether split functions alone read it."""

    def tell(self, layer: int, why: str) -> None:
        """A layer's backward stays whole in I."""

    def name_of(self, layer: int) -> str:
        """In an error."""

    def cast(self, weight: Tensor, *, make: bool) -> Tensor:
        """The cast of a weight under autocast, one for the whole step; `make` it where there is none yet."""


class Deferral:
    """What of one (stage, microbatch) waits from its I to its W."""

    def __init__(self, weights: Weights, meter: ActivationMeter, start_again: Callable[[], NoReturn]) -> None:
        # That F gave to split functions, and the layer; by identity.
        self.parameters: dict[int, tuple[nn.Parameter, int]] = {}
        self.weights = weights
        self._meter = meter
        self.start_again: Callable[[], NoReturn] | None = start_again  # None: F has ended
        self._put_off: deque[_PutOff] = deque()
        self._left: Counter[int] = Counter()  # of each weight's nodes
        self._sizes: dict[int, int] = {}  # in the meter, by storage
        self.is_open = False  # I runs: only its backward may be put off, and none that a layer takes in its forward

    @property
    def num_bytes(self) -> int:
        """That were put off, each storage once, without those of the weights."""
        return sum(self._sizes.values())

    def refuse_in_forward(self, note: _Note) -> None:
        """A layer that takes a gradient through a node of its own while F runs starts again, without split functions: of the graph
        of that gradient torch's own nodes make other sums than ours, in the last bit."""
        if self.start_again is not None and (user := user_in_force()) is not None and user.layer == note.user.layer:
            self.start_again()

    @contextmanager
    def open(self) -> Iterator[None]:
        """I runs within."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def takes(self, note: _Note, weights: list[int]) -> bool:
        """Whether the weights in these places of a node's arguments may wait."""
        if not self.is_open:
            return False
        if not note.parameters.keys() >= set(weights):
            note.user.tell("a weight of it is no plain parameter, or has hooks")
            return False
        return all(self.weights.may_wait(note.parameters[place]) for place in weights)

    def put_off(
        self,
        function: type[SplitFunction],
        ctx: Any,
        gradients: tuple[Tensor | None, ...],
        note: _Note,
        places: list[int],
    ) -> None:
        """The second half of this node's backward waits for W."""
        context = _Context(ctx)
        weights = {place: note.parameters[place] for place in places}
        held = []
        for tensor in (*context.saved_tensors, *gradients):
            if tensor is not None:
                key = self._meter.hold(tensor)
                held.append((tensor, tensor._version, key))
                if key:
                    self._sizes[key] = sum(storage.nbytes() for storage in storages_of(tensor))
        self._put_off.append(_PutOff(function, context, gradients, weights, note.user.layer, held))
        self._left.update(id(weight) for weight in weights.values())

    def run(self) -> None:
        """W: add to `.grad` of the weights, in the order of I. Autograd sums what the nodes of a microbatch give a leaf, and adds that.

        Raises:
            SavedTensorChanged: what waited was changed in place.
        """
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self._put_off:
                late = self._put_off.popleft()
                for tensor, version, _ in late.held:
                    if tensor._version != version:
                        raise SavedTensorChanged(
                            f"{self.weights.name_of(late.layer)}: a tensor {list(tensor.shape)} that W needs was changed in place after "
                            "I: a backward may not change the gradient that it is given, nor what was saved for it"
                        )
                gradients = _as_tuple(late.function.backward_weight(late.context, *late.gradients))
                for place, weight in late.weights.items():
                    key, gradient = id(weight), gradients[place]
                    if gradient is not None:
                        sums[key] = sums[key] + gradient if key in sums else gradient
                    self._left[key] -= 1
                    if not self._left[key] and key in sums:
                        accumulate(weight, sums.pop(key))
                self._release(late)

    def drop(self) -> None:
        """The step has failed: hold nothing any more."""
        while self._put_off:
            self._release(self._put_off.popleft())

    def _release(self, late: _PutOff) -> None:
        for _, _, key in late.held:
            self._meter.release(key)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad`, as autograd does where it makes no graph of it: the first gradient becomes it, with the strides of the
    parameter, and in the dtype that the parameter wants its gradient in."""
    dtype = parameter.grad_dtype or gradient.dtype
    if parameter.grad is not None:
        parameter.grad += gradient.to(dtype)
    elif gradient.stride() == parameter.stride() and gradient.dtype == dtype:
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter, dtype=dtype).copy_(gradient)
