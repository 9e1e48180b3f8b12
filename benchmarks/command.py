"""`pipetrain bench NAME ...`: runs one of the comparisons, prints its table, writes JSON and plots.

Installed are those of README's figures (pyproject.toml lists them); the others are in a checkout of the repository alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .result import Options, Result
from .unavailable import Unavailable

NAMES = {
    "overlap": "emulated stages beside torch and DeepSpeed: 2, 4 and 8 stages",
    "links": "the same over links as slow as half a forward and a whole one (needs root and tc)",
    "simulated": "measured against simulated, for every family of schedules",
    "cost": "what the runtime itself costs per op, and how planning grows",
    "host": "what the host pays for a step beside plain torch and its checkpoint",
    "split": "a backward in two halves beside a whole one: time, and what waits between them",
    "generate": "a token over two ranks beside one process",
    "replicas": "four replicas of two emulated stages: what of adding up gradients a step waits for, beside torch",
    "scaling": "what ranks hold and send with replicas, ZeRO, parts: computed and counted",
    "memory": "activation bytes per rank, and time against memory",
    "sets": "time against sets: orders for a few places beside torch without recomputation",
    "ways": "keep, recompute, offload: the simulated step over sets on the device",
    "segments": "stages recomputed in parts: time, and bytes as the square root of the layers",
    "trade": "time against bytes: whole sets, segments, selective recomputation of a transformer",
    "balance": "layers per stage balanced with R counted, compared with equal numbers",
    "foreseen": "what layers alone say of stages, and the meter of the process",
    "plan": "steps that a plan predicts beside the same steps measured",
    "ablation": "what each idea brings, alone and together",
    "real": "a GPT on this machine's cores, tokens per second",
    "replay": "one stage at real size on one GPU, its neighbours replayed",
}

_ABSENT = "not installed, but in the benchmarks/ folder of the repository: type `python -m benchmarks.command {}` in a checkout"


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 also where a promise was missed or the machine lacks something (it is said), 2 for a wrong option."""
    parser = argparse.ArgumentParser(
        prog="pipetrain bench",
        description="Comparisons with other systems, measured on this machine.",
        epilog="\n".join(f"  {name:10} {what}" for name, what in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        choices=[[], *NAMES],
        help=", ".join(NAMES) + "; default: all that are installed",
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that every system gets its turn (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="the smallest case, once: shows that it runs, proves nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and plots")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="all figures as JSON, to stdout or FILE")
    try:
        given = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    here = [name for name in NAMES if (Path(__file__).parent / name).is_dir()]
    if absent := [name for name in given.names if name not in here]:
        print(f"pipetrain bench: {', '.join(absent)}: {_ABSENT.format(' '.join(absent))}", file=sys.stderr)
        return 2
    if given.rounds < 1:
        print(f"pipetrain bench: --rounds={given.rounds}: at least 1 round is needed", file=sys.stderr)
        return 2
    # Before the fork server starts: a rank is one device of one thread, and nobody looks up names of hosts.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", DS_ACCELERATOR="cpu")
    options = Options(rounds=1 if given.quick else given.rounds, quick=given.quick, out=given.out)
    results = {}
    for name in given.names or here:
        result = run(name, options)
        if result is None:
            continue
        written = result.write(options.out)
        results[name] = json.loads(written[0].read_text())  # what is printed is what was written, to the minute
        if given.json != "-":
            print(f"{result.as_text()}\n\nwritten: {', '.join(map(str, written))}\n", flush=True)
    if given.json == "-":
        print(json.dumps(results))
    elif given.json:
        Path(given.json).write_text(json.dumps(results) + "\n")
    return 0


def run(name: str, options: Options) -> Result | None:
    """One benchmark; None, and a line on stderr, where this machine cannot run it."""
    package = __package__ or "benchmarks"
    module = importlib.import_module(f"{package}.{name}.run")
    try:
        result: Result = module.run(options)
    except Unavailable as reason:
        print(f"{name}: skipped: {reason}", file=sys.stderr)
        return None
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
