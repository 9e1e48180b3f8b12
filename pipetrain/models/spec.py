"""Everything that the rest of pipetrain needs to know of a model, in one bundle."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.config.records import ModelConfig
from pipetrain.models.sharing import Tie, groups_of, overlaps, tied_parameters, ties_of
from pipetrain.models.size import ModelSize, family_of
from pipetrain.stage.seeding import generators_restored, seed_generators, weight_seed
from pipetrain.stage.stage import LossFn

Layer = nn.Module | Callable[[], nn.Module]
TensorMapping = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def unchanged(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors as they are: a mapping that reads them from disk one by one stays one."""
    return tensors


class BuildLayers(Protocol):
    """Gives the layers `first` to `last - 1` of a model, on `device`.

    Weights that are drawn and not loaded depend on `seed` and the global index of their layer alone, never on `first` and `last`. The
    whole range is asked for at once, so that a model that is on disk can be read in one go.
    """

    def __call__(self, first: int, last: int, *, seed: int, device: torch.device) -> Sequence[nn.Module]: ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: how its layers are built, what it is trained on, and what it is called in files.

    Layer i gets what layer i - 1 returned, as one argument: a tensor or a (nested) tuple or dict. Its tensors are called as in
    `nn.Sequential(*layers)`: `3.attention.query.weight`. `fingerprint` identifies the model, in JSON's types: it is equal on all
    ranks, and a resumed run must not change it.
    """

    size: ModelSize
    build_layers: BuildLayers
    loss_fn: LossFn | None = None  # (output, targets) of a microbatch -> 0-dim, a mean over what counts
    count_fn: Callable[[Any], int | float] | None = None  # targets -> how much of them counts; None: their rows
    tied: tuple[tuple[str, str], ...] = ()  # pairs of names of parameters that are one tensor
    modules: Mapping[int, nn.Module] = field(default_factory=dict)  # layers that every rank has already, by number
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    to_file: TensorMapping = unchanged  # from the names (and layout) in the model to those in a file of weights
    from_file: TensorMapping = unchanged  # and back
    # What a user gives as inputs and targets -> what the first layer and the loss get; ValueError where it cannot be right.
    take_batch: Callable[[Any, Any], tuple[Any, Any]] | None = None

    @property
    def num_layers(self) -> int:
        return self.size.num_layers

    def build(self, first: int, last: int, *, seed: int = 0, device: torch.device | str = "cpu") -> list[nn.Module]:
        """The layers `first` to `last - 1` on `device`, with the weights that they have in the whole model of this `seed`.

        The random numbers of the caller are left as they were.
        Raises ValueError: the model has no such layers; TypeError: what was built is no layer.
        """
        if not 0 <= first < last <= self.num_layers:
            raise ValueError(f"layers {first} to {last - 1} were asked for, the model has 0 to {self.num_layers - 1}")
        with generators_restored(torch.device("cpu")):
            layers = list(self.build_layers(first, last, seed=seed, device=torch.device(device)))
        assert len(layers) == last - first, f"{len(layers)} layers were built, not {last - first}"
        return layers

    def for_loss(self, loss_fn: LossFn | None) -> ModelSpec:
        """The bundle for a loss of the user's, which gets all logits; itself where that is None."""
        return self if loss_fn is None else self.with_each_layer(_make_logits)

    def with_each_layer(self, change: Callable[[nn.Module], object]) -> ModelSpec:
        """The model with `change` called on each of its layers after it is made; it must do the same to a layer whatever the split."""

        def build(first: int, last: int, *, seed: int, device: torch.device) -> Sequence[nn.Module]:
            layers = self.build_layers(first, last, seed=seed, device=device)
            for layer in layers:
                change(layer)
            return layers

        return replace(self, build_layers=build)

    def count(self, targets: Any) -> int | float:
        """How much counts in the loss of `targets`, a batch or a microbatch: by `count_fn`, else the rows."""
        if self.count_fn is not None:
            return self.count_fn(targets)
        return next(len(leaf) for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor))

    def name_of(self, wanted: Tensor) -> str | None:
        """What a parameter or buffer is called, where its layer is among `modules`."""
        named = (
            (f"{number}.{name}", tensor)
            for number, layer in self.modules.items()
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        )
        return next((name for name, tensor in named if tensor is wanted), None)


def _make_logits(layer: nn.Module) -> None:
    if hasattr(layer, "loss_makes_logits"):
        layer.loss_makes_logits = False  # type: ignore[assignment]


def make_spec(config: ModelConfig, vocabulary_size: int, seed: int = 0) -> ModelSpec:
    """The model of the family of `model.name`. `vocabulary_size` is the tokenizer's; `model.vocab_size` wins. Raises ValueError: there is none.

    A model whose layers are made here, and not when it is built, draws their weights from `seed`.
    """
    cpu = torch.device("cpu")
    with generators_restored(cpu):
        seed_generators(seed, cpu)
        spec: ModelSpec = resolve_name(family_of(config).spec)(config, vocabulary_size)
    return spec


def spec_of(model: Any) -> ModelSpec:
    """What a user calls a model: a `ModelSpec`, an `nn.Sequential`, a list of layers or of callables that return one each, or a causal
    language model of transformers.

    Raises TypeError: not a model that can be cut; ValueError: a model of transformers that cannot be.
    """
    if isinstance(model, ModelSpec):
        return model
    library = sys.modules.get("transformers.modeling_utils")  # not imported: where there is such a model, it is there
    if library is not None and isinstance(model, library.PreTrainedModel):
        spec: ModelSpec = resolve_name("pipetrain.models.hf.hf_spec:spec_of_hf")(model)
        return spec
    layers = list(model) if isinstance(model, Iterable) and not isinstance(model, (str, bytes, dict)) else []
    wrong = [
        f"layer {number} is of type {type(one).__name__}; " for number, one in enumerate(layers) if not callable(one)
    ]
    if wrong or not layers:
        raise TypeError(
            f"a model of type {type(model).__name__} cannot be cut: {''.join(wrong[:1])}give an nn.Sequential, a list of layers, a list of "
            "callables without arguments that return a layer each, a ModelSpec, or a causal language model of transformers"
        )
    modules = {number: layer for number, layer in enumerate(layers) if isinstance(layer, nn.Module)}
    return ModelSpec(
        size=ModelSize(len(layers), flops_per_layer=_work_of(layers)),
        build_layers=one_by_one(layers),
        tied=tied_parameters(modules),
        modules=modules,
        fingerprint={"num_layers": len(layers)},
    )


_TABLES = (nn.Embedding, nn.EmbeddingBag)  # their weights are looked up, not multiplied
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def flops_of(layer: nn.Module) -> float:
    """Of one token's forward: two for each weight that is multiplied. What a convolution does with a weight again is not known."""
    weights = {
        id(parameter): parameter.numel()
        for module in layer.modules()
        if not isinstance(module, _TABLES)
        for parameter in module.parameters(recurse=False)
        if not nn.parameter.is_lazy(parameter) and parameter.dim() > 1
    }
    return 2.0 * sum(weights.values())


def _work_of(layers: Sequence[Layer]) -> tuple[float, ...] | None:
    """FLOPs of each layer; None where they are not known: of callables, and where a convolution uses a weight often."""
    known = [layer for layer in layers if isinstance(layer, nn.Module)]
    if len(known) < len(layers) or any(isinstance(one, _CONVOLUTIONS) for layer in known for one in layer.modules()):
        return None
    work = tuple(map(flops_of, known))
    return work if any(work) else None


def check_takes_one(number: int, layer: nn.Module) -> None:
    """Raises ValueError: the layer's forward needs more than what the layer before returned."""
    try:
        parameters = inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):  # of C, which does not say
        return
    named = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    needed = [one.name for one in parameters if one.kind in named and one.default is inspect.Parameter.empty]
    if len(needed) > 1:
        raise ValueError(
            f"layer {number} ({type(layer).__name__}) takes {' and '.join(needed)}, and a layer gets one argument, what the layer before "
            "returned: write a layer around it that takes a tuple of them"
        )


def one_by_one(layers: Sequence[Layer]) -> BuildLayers:
    """Builds a model from its layers: modules are taken as they are, callables called, each after seeding with (seed, index)."""

    def build(first: int, last: int, *, seed: int, device: torch.device) -> list[nn.Module]:
        built = []
        for number in range(first, last):
            layer = layers[number]
            if not isinstance(layer, nn.Module):
                torch.default_generator.manual_seed(weight_seed(seed, number))
                layer = layer()
                if not isinstance(layer, nn.Module):
                    raise TypeError(
                        f"the callable for layer {number} returned a {type(layer).__name__}, not an nn.Module"
                    )
            check_takes_one(number, layer)
            built.append(layer.to(device))
        return built

    return build


def check_sharing(spec: ModelSpec, stage_of: Callable[[int], int]) -> tuple[Tie, ...]:
    """The parameters that two stages share. Raises ValueError: more than two share one, or two parameters lie in one memory."""
    ties = ties_of(spec.tied, stage_of)
    one = {name: number for number, names in enumerate(groups_of(spec.tied)) for name in names}
    for pair in overlaps(spec.modules):
        other, stage = (stage_of(int(tensor.split(".", 1)[0])) for tensor in (pair.where, pair.here))
        is_tied = pair.where in one and one[pair.where] == one.get(pair.here)
        if other != stage and pair.has_parameter and not is_tied:
            raise ValueError(
                f"{pair.where} of stage {other} and {pair.here} of stage {stage} lie in one memory, so one changes with the other: "
                "choose a balance that puts both layers on one stage, or give each its own (.data = .data.clone())"
            )
    return ties


def check_built(spec: ModelSpec, layers: Mapping[int, nn.Module], stage_of: Callable[[int], int]) -> None:
    """Refuse what built layers share over stages and the model does not say: on other ranks they would not. Raises ValueError."""
    said = {(tie.name, tie.copy) for tie in check_sharing(spec, stage_of)}
    # Two callables may return layers that share something.
    built = replace(spec, modules=layers, tied=tied_parameters(layers))
    for tie in check_sharing(built, stage_of):
        if (tie.name, tie.copy) not in said:
            low, high = tie.stages
            raise ValueError(
                f"parameter {tie.name} of stage {low} is {tie.copy} of stage {high} as well, and only a rank that holds both can "
                f"know: say so, as in ModelSpec(tied=[({tie.name!r}, {tie.copy!r})], ...), or give layers and not callables"
            )


def with_compiled_layers(spec: ModelSpec, backend: str = "inductor") -> ModelSpec:
    """The model with each layer compiled when it first runs; names and weights stay.

    Layers of one kind run one code, with their weights as its inputs, so a kind is compiled once for all of a rank's layers: once for
    training, once for evaluation. A whole stage in one piece would be compiled anew for each split, and could not be seeded layer by layer.
    A layer of which only parts can be compiled has a `compile` of its own, in place of that of nn.Module.
    """
    return spec.with_each_layer(lambda layer: layer.compile(backend=backend))


def with_weights_in(spec: ModelSpec, dtype: torch.dtype) -> ModelSpec:
    """The model with its floating-point weights in `dtype`, which are the same whatever the split: each is rounded after it is made.

    Buffers stay: a layer knows what its statistics and tables need, and tables of positions need float32.
    """

    def cast(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    return spec.with_each_layer(cast)
