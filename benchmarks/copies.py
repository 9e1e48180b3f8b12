"""`python -m benchmarks.copies`: does a device copy to its host's memory and back at once, and how much longer do messages take beside that?

On a GPU two ranks share it, so their messages go through memory of the host, too: NCCL does not join two ranks of one GPU.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from pipetrain.comm.transport import PINNED
from pipetrain.trainer.links import measure_copies, measure_links

from .ranks import preload, run_ranks


def main() -> None:
    on_gpu = torch.cuda.is_available()
    host = measure_copies(torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    preload()
    links = run_ranks(2, measure_links, 2, PINNED if on_gpu else "auto", timeout_seconds=300.0)[0]
    slower = min(host.down_bytes_per_second, host.up_bytes_per_second)
    print(json.dumps({**asdict(host), "both_over_alone": host.both_bytes_per_second / slower, "links": asdict(links)}))


if __name__ == "__main__":
    main()
