"""What a token costs over two ranks, beside one process alone and the hops of the network."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_layers
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.stage.past import Past, run_cached

from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target

CLAIM = "a token over two ranks takes at most 1.2 x as long as on one process and the two hops of the network"
MOST = 1.2
VOCABULARY = 8192
PROMPT = list(range(1, 33))
# 30 and 210 million parameters: what a token costs besides the layers is the same, and shows more in the smaller one.
SIZES = (
    ModelConfig(num_hidden_layers=8, hidden_size=512, num_attention_heads=8),
    ModelConfig(num_hidden_layers=16, hidden_size=1024, num_attention_heads=16),
)
_HOPS_PER_TOKEN = 2  # the hidden state there, the token back


@dataclass(frozen=True)
class Measured:
    """Seconds per token, one for each round, of one model: alone, over two ranks, and one hop."""

    model: str
    alone: tuple[float, ...]
    over_two: tuple[float, ...]
    hop: tuple[float, ...]

    @property
    def ratio(self) -> float:
        alone, over_two, hop = map(statistics.median, (self.alone, self.over_two, self.hop))
        return over_two / (alone + _HOPS_PER_TOKEN * hop)


def run(options: Options) -> Result:
    num_tokens = 8 if options.quick else 100
    config, *larger = (
        SIZES if not options.quick else (ModelConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=8),)
    )
    sizes = [asdict(one) for one in (config, *larger)]
    settings = {"rounds": options.rounds, "models": sizes, "tokens": num_tokens, "prompt": len(PROMPT)}
    result = Result("generate", CLAIM, settings=settings)
    has_transformers = importlib.util.find_spec("transformers") is not None
    preload("pipetrain.models.transformer", *(["transformers"] if has_transformers else []))
    measured = []
    for size in (config, *larger):
        name = f"{size.num_hidden_layers} blocks of {size.hidden_size}"
        measured.append(_measure(f"built-in llama, {name}", _built_in, size, num_tokens, options.rounds, _alone))
        if has_transformers:
            theirs = f"transformers' Llama, {name}"
            measured.append(_measure(theirs, _of_transformers, size, num_tokens, options.rounds, _theirs))
    if not has_transformers:
        result.notes.append("transformers is not installed: its Llama was left out")
    result.tables += [_table(measured)]
    result.targets = [Target(f"{one.model}: two ranks / (one process + 2 hops)", one.ratio, MOST) for one in measured]
    result.data = {"models": [asdict(one) for one in measured]}
    return result


def _measure(
    model: str,
    make: Callable[[ModelConfig], list[nn.Module]],
    config: ModelConfig,
    num_tokens: int,
    rounds: int,
    alone: Callable[[ModelConfig, int], float],
) -> Measured:
    """All three in turns."""
    turns = [
        (
            run_ranks(1, alone, config, num_tokens)[0],
            run_ranks(2, _over_two, make, config, num_tokens)[0],
            run_ranks(2, _hop, config.hidden_size)[0],
        )
        for _ in range(rounds)
    ]
    return Measured(model, *zip(*turns, strict=True))


def _per_token(times: Sequence[float]) -> float:
    """The median time from one token to the next; what comes before the second is the prompt."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[1:]))


# What is measured, each in a process of its own ---------------------------------------------------------------------


def _built_in(config: ModelConfig) -> list[nn.Module]:
    torch.manual_seed(0)
    return [build().eval() for build in transformer_layers(config, VOCABULARY)]


@torch.inference_mode()
def _alone(config: ModelConfig, num_tokens: int) -> float:
    """A plain loop over the layers."""
    layers, past, tokens = _built_in(config), Past([0], torch.device("cpu")), torch.tensor([PROMPT])
    times = []
    for _ in range(num_tokens):
        past.begin(tokens.shape[1])
        value: Any = tokens
        for layer in layers:
            value = run_cached(layer, value, past)
        past.end()
        tokens = value[:, -1].argmax(-1, keepdim=True)
        tokens.tolist()
        times.append(time.perf_counter())
    return _per_token(times)


def _over_two(make: Callable[[ModelConfig], list[nn.Module]], config: ModelConfig, num_tokens: int) -> float:
    times: list[float] = []
    with Pipeline(make(config)) as pipeline:
        pipeline.generate([PROMPT], max_new_tokens=num_tokens, on_token=lambda *_: times.append(time.perf_counter()))
    return _per_token(times)


def _hop(hidden_size: int, num_trips: int = 300) -> float:
    """Half of a message's round trip: a hidden state of one token, by `torch.distributed`'s own send and receive."""
    message, times = torch.zeros(1, 1, hidden_size), []
    other = 1 - dist.get_rank()
    for _ in range(num_trips):
        if dist.get_rank() == 0:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)
        times.append(time.perf_counter())
    return _per_token(times) / 2


def _llama(config: ModelConfig) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=config.hidden_size,
        intermediate_size=8 * config.hidden_size // 3,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(llama).eval()


def _of_transformers(config: ModelConfig) -> list[nn.Module]:
    adapter = importlib.import_module("pipetrain.models.hf.hf_spec")
    layers: list[nn.Module] = adapter.layers_of(_llama(config), 0, config.num_hidden_layers + 2)
    return layers


def _theirs(config: ModelConfig, num_tokens: int) -> float:
    """Its own `generate`."""
    times: list[float] = []

    def stop(ids: Tensor, _: Any, **_others: Any) -> Tensor:
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    prompt = torch.tensor([PROMPT])
    generate = partial(_llama(config).generate, prompt, attention_mask=torch.ones_like(prompt), do_sample=False)
    generate(max_new_tokens=num_tokens, stopping_criteria=[stop])
    return _per_token(times)


# What is shown -------------------------------------------------------------------------------------------------------


def _table(measured: list[Measured]) -> Table:
    rows = []
    for one in measured:
        alone, over_two, hop = (statistics.median(times) * 1e3 for times in (one.alone, one.over_two, one.hop))
        rows.append((one.model, f"{alone:.2f}", f"{hop:.3f}", f"{over_two:.2f}", f"{one.ratio:.3f}"))
    title = f"one prompt, one thread per rank; ms per token, medians of {len(measured[0].alone)} rounds"
    return Table(title, ("", "one process", "a hop", "two ranks", "two ranks / (one process + 2 hops)"), tuple(rows))
