"""Which modules of a Hugging Face causal language model make which of our layers: found out by running it, without its family's name.

The *owner* is the module whose forward calls the decoder layers (`model` of Llama, `model.decoder` of OPT). That forward is run on two
tokens, with a recorder in place of each decoder layer and a module that returns what it gets in place of each module with weights:

    inputs_embeds --> [what has weights] --> recorder 0 --> ... --> recorder n-1 --> [norm] --> its output
                       layer 0                                                       layer n + 1

It computes nothing, so it costs milliseconds, and works as well on the meta device and where parts are `Elsewhere`. What it shows is also
what makes a model fit for stages at all: each decoder layer gets what the one before returned and nothing else that depends on the tokens'
values, and after the last one modules follow each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel, masking_utils

from pipetrain.models.weights import LazyTensors

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Parts:
    """Full names of modules. Our layer 0 is `embedding`, layer i the decoder layer i - 1, the last one `head`, in the order of its calls.

    hidden_key: where a decoder layer gets the hidden state, a position or a name. returns_tuple: whether it returns it as the first of several.
    """

    layers: str
    num_decoder_layers: int
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    hidden_key: int | str = 0
    returns_tuple: bool = False

    @property
    def owner(self) -> str:
        """The module whose forward calls the decoder layers; empty: the model itself."""
        return self.layers.rpartition(".")[0]

    @property
    def list_name(self) -> str:
        """What the owner calls the list of its decoder layers."""
        return self.layers.rpartition(".")[2]

    @property
    def after(self) -> tuple[str, ...]:
        """What the owner calls the modules that follow the last decoder layer, in their order."""
        start = f"{self.owner}." if self.owner else ""
        return tuple(name.removeprefix(start) for name in self.head if name.startswith(start))

    @property
    def num_layers(self) -> int:
        """Layers of ours."""
        return self.num_decoder_layers + 2

    def hidden_in(self, call: Call) -> Tensor:
        """The hidden state that a decoder layer is called with."""
        args, kwargs = call
        hidden: Tensor = args[self.hidden_key] if isinstance(self.hidden_key, int) else kwargs[self.hidden_key]
        return hidden

    def modules_of(self, number: int) -> tuple[str, ...]:
        """The modules that make our layer `number`."""
        if number == 0:
            return self.embedding
        if number == self.num_layers - 1:
            return self.head
        return (f"{self.layers}.{number - 1}",)

    def layer_of(self, name: str) -> int | None:
        """The number of our layer that a tensor or module of this name belongs to; None: of none (rotary tables)."""
        for number in (0, self.num_layers - 1):
            if any(f"{name}.".startswith(f"{module}.") for module in self.modules_of(number)):
                return number
        prefix = f"{self.layers}."
        return int(name.removeprefix(prefix).split(".", 1)[0]) + 1 if name.startswith(prefix) else None

    # The names of tensors, both ways: in our layers, and in the whole model of transformers, which is what files have:
    #
    # 0.owner.embed_tokens.weight          model.embed_tokens.weight
    # 1.layer.mlp.up_proj.weight           model.layers.0.mlp.up_proj.weight
    # 5.model.model.norm.weight            model.norm.weight
    # 5.model.lm_head.weight               lm_head.weight

    def _prefixes(self, number: int) -> tuple[str, str]:
        """How names of our layer `number` begin, here and in files."""
        if number == 0:
            return "0.owner.", f"{self.owner}." if self.owner else ""
        if number < self.num_layers - 1:
            return f"{number}.layer.", f"{self.layers}.{number - 1}."
        return f"{number}.model.", ""

    def in_file(self, name: str) -> str:
        """What transformers calls the tensor that we call `name`."""
        ours, theirs = self._prefixes(int(name.partition(".")[0]))
        return theirs + name.removeprefix(ours)

    def in_layers(self, name: str) -> str:
        """What we call the tensor that transformers calls `name`. One that it has no layer for is called as it is."""
        if (number := self.layer_of(name)) is None:
            return name
        ours, theirs = self._prefixes(number)
        return ours + name.removeprefix(theirs)

    def to_file(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return LazyTensors({self.in_file(name): partial(tensors.__getitem__, name) for name in tensors})

    def from_file(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return LazyTensors({self.in_layers(name): partial(tensors.__getitem__, name) for name in tensors})


class Elsewhere(nn.Module):
    """Stands where another stage has the module: without weights, and never run. `number` is our layer that it belongs to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError(f"a module of layer {self.number} is run, which is on another stage")


class AsGiven(nn.Module):
    """In place of a module that is not to run: returns the hidden state that it is given, or a zero that adds nothing.

    Never what it was given of another kind (token ids, positions): that would be added to a hidden state.
    """

    def __init__(self, on_call: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.on_call = on_call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.on_call is not None:
            self.on_call()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() == 3), None)
        return torch.zeros((), device=tensors[0].device if tensors else None) if hidden is None else hidden


def model_parts(model: PreTrainedModel) -> Parts:
    """The parts of a model, whole, on meta, or with modules `Elsewhere`. Raises ValueError: it cannot be cut; the message has the reason."""
    config = model.config.get_text_config(decoder=True)
    try:
        if key := next((key for key in _BETWEEN if getattr(config, key, 0)), None):
            raise _Unfit(f"{_BETWEEN[key]} ({key}={getattr(config, key)} in its config)")
        layers, number = _list_of_layers(model)
        try:
            return _traced(model, layers, number, returns_tuple=False)
        except _Unfit:
            with contextlib.suppress(_Unfit):
                return _traced(model, layers, number, returns_tuple=True)
            raise
    except _Unfit as fault:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into stages: {fault}. docs/MODELS.md has the families that can; a model of your own is a "
            "list of layers, or a ModelSpec"
        ) from fault


# What decoder layers get beside the hidden state, by the field of the config that says so.
_BETWEEN = {
    "hidden_size_per_layer_input": "each decoder layer gets its own embedding of each token",
    "num_kv_shared_layers": "its last decoder layers use keys and values of earlier ones",
}


class _Unfit(Exception):
    """Why a model cannot be cut."""


def _list_of_layers(model: PreTrainedModel) -> tuple[str, int]:
    """The name of the only list of decoder layers, and how many there are. A list in a list is none: of experts, say."""
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
    found = [name for name in outermost if len(lists[name]) == number]
    if not found or number is None:
        raise _Unfit(f"it has no list of {number} decoder layers (num_hidden_layers of its config)")
    if len(found) > 1:
        raise _Unfit(f"it has several lists of {number} layers ({', '.join(found)})")
    return found[0], number


def _traced(model: PreTrainedModel, layers: str, number: int, returns_tuple: bool) -> Parts:
    owner_name, _, list_name = layers.rpartition(".")
    owner = model.get_submodule(owner_name)
    called: list[str] = []
    stand_ins = {
        name: AsGiven(lambda name=name: called.append(name))  # type: ignore[misc]
        for name, child in owner.named_children()
        if name != list_name and has_part(child)
    }
    hollow = hollowed(owner, stand_ins).eval()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    hidden = torch.zeros(1, 2, model.config.hidden_size, device=device, requires_grad=True)
    calls, returned, output = _recorded_run(hollow, list_name, number, hidden, returns_tuple, called)
    given = [hidden, *returned]
    key = _key_of(calls, given)
    for index, call in enumerate(calls):
        if more := [str(each) for each in _tensors_with_gradient(call) if each != key]:
            raise _Unfit(
                f"decoder layer {index} gets {', '.join(more)} beside the hidden state, which depends on the tokens' embeddings"
            )
    last = output if isinstance(output, Tensor) else output[0]  # the hidden state, or a view of all of it
    is_view = isinstance(last, Tensor) and last._base is given[-1] and last.shape == given[-1].shape
    if last is not given[-1] and not is_view:
        raise _Unfit("something happens to the hidden state after its last decoder layer that is no module of its own")
    at = called.index(list_name)  # the first decoder layer
    after = [name for name in called[at:] if name != list_name]
    start = f"{owner_name}." if owner_name else ""
    rest = [name for name, child in _beside(model, owner_name) if has_part(child)]
    return Parts(
        layers=layers,
        num_decoder_layers=number,
        embedding=tuple(start + name for name in stand_ins if name in called[:at] or name not in after),
        head=(*(start + name for name in after), *rest),
        hidden_key=key,
        returns_tuple=returns_tuple,
    )


def has_part(module: nn.Module) -> bool:
    """Whether a module belongs to one of our layers: it has weights, it is elsewhere, or it changes the hidden state as it passes."""
    kinds = (Elsewhere, nn.Identity, nn.Dropout)
    return isinstance(module, kinds) or any(True for _ in module.parameters())


def _beside(model: nn.Module, owner: str) -> Iterator[tuple[str, nn.Module]]:
    """The topmost modules that the owner does not lie in: the logits, as a rule."""
    path, steps = "", owner.split(".") if owner else []
    for step in steps:
        module = model.get_submodule(path)
        yield from ((f"{path}.{name}".lstrip("."), child) for name, child in module.named_children() if name != step)
        path = f"{path}.{step}".lstrip(".")


def _recorded_run(
    hollow: nn.Module, list_name: str, number: int, hidden: Tensor, returns_tuple: bool, called: list[str]
) -> tuple[list[Call], list[Tensor], Any]:
    """What the decoder layers were called with and returned, and the owner's output; `called` gets `list_name` at each call of a layer."""
    calls: list[Call] = []
    returned: list[Tensor] = []

    def recorder(*args: Any, **kwargs: Any) -> Any:
        called.append(list_name)
        calls.append((args, kwargs))
        returned.append(torch.zeros_like(hidden, requires_grad=True))
        return (returned[-1],) if returns_tuple else returned[-1]

    # Else transformers puts its hooks into the decoder layers, which the hollow copy shares with the model, and again when the model runs.
    hollow.__dict__ |= {list_name: [recorder] * number, "_output_capturing_hooks_installed": True}
    try:
        with torch.enable_grad(), masks_decided(packed=False, waits=False):
            output = hollow(inputs_embeds=hidden, use_cache=False)
    except Exception as error:
        if isinstance(error, TypeError) and "inputs_embeds" not in signature(hollow.forward).parameters:
            raise _Unfit(
                f"its {type(hollow).__name__}, which calls the decoder layers, takes no embeddings (inputs_embeds)"
            ) from error
        raise _Unfit(
            f"the forward of its {type(hollow).__name__} fails on inputs_embeds alone ({type(error).__name__}: {error})"
        ) from error
    if len(calls) != number:
        raise _Unfit(f"its forward calls {len(calls)} of its {number} decoder layers")
    return calls, returned, output


def _key_of(calls: Sequence[Call], given: Sequence[Tensor]) -> int | str:
    """Where each decoder layer gets what the one before it returned."""
    keys = [[key for key, value in _items(call) if value is wanted] for call, wanted in zip(calls[1:], given[1:])]
    first = keys[0] if keys else _tensors_with_gradient(calls[0])
    if any(len(each) != 1 or each != first for each in keys) or len(first) != 1:
        raise _Unfit("a decoder layer does not get what the one before it returned, and that alone")
    return first[0]


def _items(call: Call) -> Iterator[tuple[int | str, Any]]:
    args, kwargs = call
    yield from enumerate(args)
    yield from kwargs.items()


def _tensors_with_gradient(call: Call) -> list[int | str]:
    return [
        key
        for key, value in _items(call)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))
    ]


# A model with other modules in it ----------------------------------------------------------------------------------


def hollowed(module: nn.Module, replaced: Mapping[str, nn.Module | None]) -> Any:
    """A copy of `module` that shares all it has with it, but for the modules of these names: others stand there, or (None) nothing."""
    copy: Any = object.__new__(type(module))
    copy.__dict__ = {
        name: dict(value) if name in ("_modules", "_parameters", "_buffers") else value
        for name, value in vars(module).items()
    }
    for name, other in replaced.items():
        first, _, rest = name.partition(".")
        if rest:
            copy._modules[first] = hollowed(copy._modules[first], {rest: other})
        elif other is None:
            del copy._modules[first]
        else:
            copy._modules[first] = other
    return copy


# What a forward's masks depend on -----------------------------------------------------------------------------------

_PATCHING = threading.RLock()


@contextlib.contextmanager
def masks_decided(*, packed: bool, waits: bool) -> Iterator[None]:
    """In the block transformers makes masks without a look at values, as far as they are known otherwise.

    `packed`: positions were given and may restart; where they were not, they do not. `waits`: whether it may look at a mask to leave
    out one that masks nothing: a wait for the device in each F and R.
    """
    with _PATCHING:
        found, tracing = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
        try:
            if not packed:
                masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
            if not waits:
                masking_utils.is_tracing = lambda tensor=None: True  # noqa: ARG005
            yield
        finally:
            masking_utils.find_packed_sequence_indices, masking_utils.is_tracing = found, tracing
