"""What layers take and hold on devices that are not here: the record that `profile.json` is read into, from a model's sizes alone.

    time of an op = its FLOPs / (peak x efficiency) + its bytes / (bandwidth x efficiency) + its messages to other tensor ranks

An estimate, and called so wherever it is printed. Bytes are those of fused layers without dropout; attention keeps no scores. With `tensor`
ranks in a stage each has its share of matrices, heads and (sequence parallelism) of what is between them. Two all-reduces per block and
direction join them, each as a reduce-scatter and an all-gather (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import LOSS, HostLink, LayerProfile, Link, Profile, SavedTensor

CLUSTER, TENSOR = "plan.cluster", "plan.tensor"  # conditions of an estimate
_ADAM_MOMENTS, _ID_BYTES = 2, 8
_SAMPLES = 2  # of a microbatch; a line through this size and 1 says what others take
# Backward over forward: of a matrix product the gradients of both operands; of attention five products in place of two (Dao, "FlashAttention-2",
# 2023, section 3.1); of the rest twice the bytes.
_BACKWARD = (2.0, 2.5, 2.0)


class DecoderSizes(Protocol):
    """A decoder's sizes, as `HfShape` reads them from config.json. Methods are per decoder layer: `mixing`: attention parameters; `feeding`: the
    MLP's, all and those a token uses; `looked_at`: most positions that attention reads.
    """

    num_decoder_layers: int
    width: int
    heads: int
    head_size: int
    vocabulary_size: int
    is_gated: bool

    def kind(self, number: int) -> str: ...
    def mixing(self, number: int) -> int: ...
    def feeding(self, number: int) -> tuple[int, int]: ...
    def looked_at(self, number: int, sequence_length: int) -> int: ...


@dataclass(frozen=True)
class _Work:
    """What one layer is on one device. Its forward: FLOPs, bytes of memory that ops read and write, bytes that go to other tensor ranks; R does
    not come to the last `tail` FLOPs. Bytes of its input, its output, the rest of its set, and the largest tensor of that.
    """

    numbers: tuple[int, ...]
    kind: str
    input: float
    output: float
    inner: float = 0.0
    largest: float = 0.0
    parameters: float = 0.0
    matmul: float = 0.0
    tail: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    messages: float = 0.0


@dataclass(frozen=True)
class Estimator:
    """Estimates of a model on one device of a stage. Samples have `sequence_length` tokens, a stage has `tensor` ranks; `precision` is the
    configuration's, but for `auto`.

    Raises:
        ValueError: tensor ranks that no machine of the cluster has room for, or a precision that the device does not have.
    """

    sizes: DecoderSizes
    cluster: Cluster
    sequence_length: int
    tensor: int = 1
    precision: str = "bf16-mixed"

    def __post_init__(self) -> None:
        per_node, device = self.cluster.devices_per_node, self.cluster.device
        if self.tensor < 1 or per_node % self.tensor:
            fitting = ", ".join(str(count) for count in range(1, per_node + 1) if per_node % count == 0)
            raise ValueError(
                f"plan.tensor={self.tensor}: the tensor ranks of a stage share one of the machines of {CLUSTER}={self.cluster.text}, with "
                f"{per_node} devices; allowed are {fitting}"
            )
        if self.number_bytes == 2 and not device.bf16:
            raise ValueError(f"precision={self.precision}: {device.name} has no known speed for it; use precision=fp32")

    @property
    def weight_bytes(self) -> int:
        """Per element of weights."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def number_bytes(self) -> int:
        """Per element of activations."""
        return 4 if self.precision == "fp32" else 2

    def profile(self) -> Profile:
        """The layers of the model, embedding and head included, and the loss. Links between stages are those between machines, if
        there are several.
        """
        cluster = self.cluster
        link = Link(cluster.device.latency_seconds, cluster.bandwidth(within_node=cluster.num_nodes == 1))
        speed = cluster.device.host_bandwidth
        host = None if speed is None else HostLink(speed, speed, speed, cluster.device.copy_contention)
        return Profile(
            conditions={CLUSTER: cluster.text, TENSOR: self.tensor},
            layers=tuple(map(self._layer, self._works(_SAMPLES))),
            samples=_SAMPLES,
            smaller=tuple(map(self._layer, self._works(1))),
            link=link,
            host=host,
            device="cuda" if cluster.device.bf16 else "cpu",
        )

    def _works(self, samples: int) -> Iterator[_Work]:
        """Of the embedding, of decoder layers that are alike, of the head and of the loss, which saves float32 logits."""
        tokens, sizes, size = samples * self.sequence_length, self.sizes, self.number_bytes
        last = sizes.num_decoder_layers + 1
        entries = sizes.vocabulary_size * sizes.width / self.tensor
        hidden, logits = tokens * sizes.width / self.tensor, tokens * sizes.vocabulary_size / self.tensor
        output = hidden * size
        yield _Work((0,), "embedding", tokens * _ID_BYTES, output, parameters=entries, memory=2 * output)
        alike: dict[Any, list[int]] = {}
        for number in range(sizes.num_decoder_layers):
            reach = sizes.looked_at(number, self.sequence_length)
            key = sizes.kind(number), sizes.mixing(number), *sizes.feeding(number), reach
            alike.setdefault(key, []).append(number + 1)
        for key, numbers in alike.items():
            yield self._decoder_layer(tokens, tuple(numbers), *key)
        yield _Work(
            (last,),
            "head",
            input=hidden * size,
            output=logits * size,
            inner=hidden * size,
            parameters=entries + sizes.width,
            matmul=2 * tokens * entries,
            memory=(4 * hidden + logits) * size,
        )
        yield _Work((last + 1,), LOSS, logits * size, 4, inner=logits * 4, memory=logits * (size + 8))

    def _decoder_layer(
        self, tokens: int, numbers: tuple[int, ...], kind: str, mixing: int, all_feeding: int, feeding: int, reach: int
    ) -> _Work:
        """`mixing` and `feeding` are parameters. Per token, queries, keys, values and attention's output have mixing / width elements."""
        sizes, share, size = self.sizes, tokens / self.tensor, self.number_bytes
        width, inner, ends = sizes.width, feeding / sizes.width, 4 if sizes.is_gated else 2
        matrices = 3 if sizes.is_gated else 2
        positions = reach - reach * reach / (2 * self.sequence_length)  # on average: a token reads none behind it
        gathered = tokens * width * size
        return _Work(
            numbers,
            kind,
            input=share * width * size,
            output=share * width * size,
            inner=share * size * (3 * width + mixing / width + inner / matrices * ends),
            largest=max(share * size * inner / matrices, gathered if self.tensor > 1 else 0),
            parameters=(mixing + all_feeding + 2 * width) / self.tensor,
            matmul=2 * share * (mixing + feeding),
            tail=2 * share * feeding / matrices,  # the last product, whose result nothing saves
            attention=4 * share * sizes.heads * sizes.head_size * positions,
            # Norms with their sums, rotary positions, activation.
            memory=share * size * (8 * width + mixing / width + inner),
            messages=4 * (self.tensor - 1) / self.tensor * gathered,
        )

    def _layer(self, work: _Work) -> LayerProfile:
        forward, inner, trained = self._seconds(work), round(work.inner), round(work.parameters * self.weight_bytes)
        return LayerProfile(
            numbers=work.numbers,
            kind=work.kind,
            forward_seconds=forward,
            backward_seconds=self._seconds(work, _BACKWARD),
            recompute_seconds=forward,
            recompute_last_seconds=forward - work.tail / self._matmul_speed,
            selective_seconds=0.0,
            saved_bytes=inner + round(work.input),
            inner_bytes=inner,
            saves_input=work.kind != LOSS,
            saves_output=False,
            input_bytes=round(work.input),
            output_bytes=round(work.output),
            parameter_bytes=trained,
            gradient_bytes=trained,
            optimizer_bytes=_ADAM_MOMENTS * trained,
            largest=(SavedTensor("mm", (), "", round(work.largest), 0.0),) if work.largest else (),
        )

    @property
    def _peak(self) -> float:
        return self.cluster.device.bf16 if self.number_bytes == 2 else self.cluster.device.fp32

    @property
    def _matmul_speed(self) -> float:
        return self._peak * self.cluster.device.efficiency.matmul

    def _seconds(self, work: _Work, times: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> float:
        """Seconds of `work`; `times` scale its FLOPs and bytes."""
        device, (matmul, attention, memory) = self.cluster.device, times
        return (
            matmul * work.matmul / self._matmul_speed
            + attention * work.attention / (self._peak * device.efficiency.attention)
            + memory * work.memory / (device.memory_bandwidth * device.efficiency.memory)
            + work.messages / self.cluster.bandwidth(within_node=True)
        )
