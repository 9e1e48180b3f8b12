"""What a process grows by in a step, beside what the meter counts: five models, each in a process of its own.

    python -m benchmarks.resident [MODEL ...] [--json]

The kernel says how much memory a process has: the most since it was last asked (`VmHWM`, set back through
`/proc/self/clear_refs`). Larger tensors get pages of their own and give them back (`MALLOC_MMAP_THRESHOLD_`), else the
allocator would keep what is free. Gradients stay from step to step, and the batch is there before a step begins: neither is
growth, and what the meter counts of the batch is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
FIRST_STEP, STEPS = 3, 3  # measured from the third on: memory is taken, and gradients are there
MICROBATCHES = 2
Build = Callable[[], tuple[list[Any], Any, Any]]  # layers, inputs, a loss of the output alone


@dataclass(frozen=True)
class Grown:
    """Bytes of one model: a set of one microbatch, the most that the meter counted of a step, batch left out, and what the process
    grew by."""

    model: str
    mode: str
    set_bytes: int
    metered: int
    grown: int

    @property
    def ratio(self) -> float:
        return self.grown / self.metered


def measure(model: str, mode: str, *, share: int = 1) -> Grown:
    """In a process of its own; of the first of `share` equal shares of the layers.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", __spec__.name, model, f"--mode={mode}", f"--share={share}", "--here"]
    root = str(Path(__file__).resolve().parents[__spec__.name.count(".")])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **THRESHOLD, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return Grown(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(model: str, mode: str, share: int) -> Grown:
    import torch

    from pipetrain.runtime.pipeline import Pipeline
    from pipetrain.schedule.policy import RecomputePolicy

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers, inputs, loss_fn = MODELS[model]()
    layers = layers[: len(layers) // share]
    targets = torch.zeros(len(inputs))
    policy = RecomputePolicy(mode, last_stage="always")  # type: ignore[arg-type]
    found = []
    with Pipeline(layers, loss_fn, num_microbatches=MICROBATCHES, recompute=policy) as pipeline:
        for step in range(1, STEPS + 1):
            before = _forget_peak()
            pipeline.step(inputs, targets)
            if step >= FIRST_STEP:
                found.append(_status("VmHWM") - before)
        report = pipeline.report
    counted = inputs.untyped_storage().nbytes()  # a microbatch is a view of it, stashed or saved by the first layer
    return Grown(model, mode, report.set_bytes, report.peak_activation_bytes - counted, max(found))


def _forget_peak() -> int:
    """Bytes that the process has now, which are its most from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}: this needs Linux")


# The models ------------------------------------------------------------------------------------------------------------


def _transformer(style: str, dropout: float) -> Build:
    def build() -> tuple[list[Any], Any, Any]:
        import torch

        from pipetrain.config.records import ModelConfig
        from pipetrain.models.transformer import transformer_layers

        config = ModelConfig(name=style, num_hidden_layers=6, hidden_size=256, num_attention_heads=4, dropout=dropout)
        layers = [make() for make in transformer_layers(config, 256)]
        return layers, torch.randint(256, (MICROBATCHES * 8, 256)), _mean_of_squares

    return build


def _perceptron() -> tuple[list[Any], Any, Any]:
    import torch
    from torch import nn

    layers: list[Any] = []
    for _ in range(12):
        layers.append(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    return layers, torch.randn(MICROBATCHES * 8192, 64), _mean_of_squares


def _convolutions() -> tuple[list[Any], Any, Any]:
    import torch
    from torch import nn

    layers: list[Any] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(18):
        layers.append(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()))
    return layers, torch.randn(MICROBATCHES * 12, 3, 64, 64), _mean_of_squares


def _encoder() -> tuple[list[Any], Any, Any]:
    import torch
    from torch import nn

    layers: list[Any] = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, activation="gelu") for _ in range(6)
    ]
    return layers, torch.randn(MICROBATCHES * 8, 256, 256), _mean_of_squares


def _mean_of_squares(output: Any, _: Any) -> Any:
    return output.square().mean()


MODELS: dict[str, Build] = {
    "llama": _transformer("llama", 0.0),
    "gpt2": _transformer("gpt2", 0.1),
    "perceptron": _perceptron,
    "convolutions": _convolutions,
    "encoder": _encoder,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resident", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--mode", default="overlap", help="of recomputation (default: overlap)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--share", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    for model in given.models or MODELS:
        found = _measure_here(model, given.mode, given.share) if given.here else measure(model, given.mode)
        if given.json or given.here:
            print(json.dumps(asdict(found)), flush=True)
        else:
            sizes = ", ".join(
                f"{what} {size / 1e6:.1f} MB"
                for what, size in (("set", found.set_bytes), ("meter", found.metered), ("process", found.grown))
            )
            print(f"{found.model:12} {found.mode}: {sizes}, process / meter {found.ratio:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
