"""Decoders by their sizes, for plans of devices that are not here."""

from dataclasses import replace

from pipetrain.models.hf.hf_size import HfShape
from pipetrain.plan.cluster import parse_cluster
from pipetrain.plan.estimate import Estimator
from pipetrain.plan.profile import Profile


def llama(layers: int, width: int, heads: int, inner: int, vocabulary: int = 128_256) -> HfShape:
    """As config.json of Llama 3 has its sizes (arXiv 2407.21783, table 3)."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": 8}
    rest = {"intermediate_size": inner, "vocab_size": vocabulary, "hidden_act": "silu", "tie_word_embeddings": False}
    return HfShape({"model_type": "llama", **sizes, **rest})


LLAMA_8B = llama(32, 4096, 32, 14336)
LLAMA_70B = llama(80, 8192, 64, 28672)
LLAMA_405B = llama(126, 16384, 128, 53248)


# Float8 layers of an H100: its peak over that of bf16, and the share of it that they reach with their scaling and casts. Fitted so that Llama 3.1 8B
# gets the 8,532 tokens/s per GPU that torchtitan measured (table 1 of the benchmarks that `pipetrain/plan/cluster.py` names).
FLOAT8_PEAK, FLOAT8_SHARE = 1978.9 / 989.4, 0.37


def profile_of(sizes: HfShape, cluster: str, tensor: int, *, float8: bool = False) -> Profile:
    """Of samples of 8,192 tokens; `float8`: decoder layers multiply in float8, which pipetrain does not do and torchtitan does."""
    machines = parse_cluster(cluster)
    plain = Estimator(sizes, machines, 8192, tensor, "bf16-mixed").profile()
    if not float8:
        return plain
    quick = replace(machines.device.efficiency, matmul=FLOAT8_PEAK * FLOAT8_SHARE)
    machines = replace(machines, device=replace(machines.device, efficiency=quick))
    fast = Estimator(sizes, machines, 8192, tensor, "bf16-mixed").profile()
    layers, smaller = (
        tuple(one if one.kind == "decoder" else other for one, other in zip(*both))
        for both in ((fast.layers, plain.layers), (fast.smaller, plain.smaller))
    )
    return replace(plain, layers=layers, smaller=smaller)
