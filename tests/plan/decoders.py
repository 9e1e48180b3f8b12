"""Decoders by their sizes, for plans of devices that are not here."""

from pipetrain.models.hf.hf_size import HfShape
from pipetrain.plan.cluster import parse_cluster
from pipetrain.plan.estimate import Estimator
from pipetrain.plan.profile import Profile


def llama(layers: int, width: int, heads: int, inner: int, vocabulary: int = 128_256) -> HfShape:
    """As config.json of Llama 3 has its sizes (arXiv 2407.21783, table 3)."""
    return HfShape(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )


LLAMA_8B = llama(32, 4096, 32, 14336)
LLAMA_70B = llama(80, 8192, 64, 28672)
LLAMA_405B = llama(126, 16384, 128, 53248)


def profile_of_405b(cluster: str, *, float8: bool = False) -> Profile:
    return Estimator(LLAMA_405B, parse_cluster(cluster), 8192, 8, "bf16-mixed", float8).profile()
