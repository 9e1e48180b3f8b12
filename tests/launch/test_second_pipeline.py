"""A process may make one Pipeline after another, although the ports of the first are closed."""

from pathlib import Path

from commands import begin, torchrun

SCRIPT = """
import torch
from torch import nn
from pipetrain import Pipeline

for _ in range(2):
    with Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, num_microbatches=2, balance=[1, 1]) as pipeline:
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
"""


def test_ranks_meet_a_second_time(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = begin(tmp_path, [*torchrun(), "--nproc-per-node=2", "script.py"])
    try:
        _, told = ranks.communicate(timeout=300)
    finally:
        ranks.terminate()
    assert ranks.returncode == 0, told
