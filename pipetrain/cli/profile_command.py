"""`pipetrain profile`: measures time and memory of each layer on this device, and lists outputs that are worth keeping."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipetrain.cli.main import Arguments, Parser, add_json, add_overrides, add_own, present, say
from pipetrain.config.load import load_config
from pipetrain.config.read_files import fitted
from pipetrain.config.records import WEIGHTS_IN, RunConfig
from pipetrain.config.together import check_run
from pipetrain.engine.available import check_engine
from pipetrain.launcher.outcome import Exit
from pipetrain.monitor.draw.table import Table, size
from pipetrain.plan.profile import LOSS, LayerProfile, Links, Profile
from pipetrain.plan.world import world_of
from pipetrain.trainer.prepare import conditions_of

_MOST_ADVICE = 5
ROUNDS = 9
_LINK_SECONDS = 180.0  # that ranks may take to measure links: start, meet and end


def add_arguments(parser: Parser) -> None:
    add_overrides(parser)
    add_own(parser)
    add_json(parser)
    parser.add_argument(
        "--out", metavar="FILE", default="profile.json", help="the file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="measurements of which the median is taken (default: %(default)s)"
    )


def run(arguments: Arguments) -> int:
    if arguments.rounds < 1:
        raise ValueError(f"--rounds={arguments.rounds}: allowed is 1 or more")
    config = load_config(arguments.overrides, say)
    profile = measure_profile(config, arguments.rounds)
    Path(arguments.out).write_text(profile.as_json())
    advice = advice_of(profile, config.pipeline.num_microbatches)
    present(
        arguments,
        lambda: f"{_table(profile, advice)}\nprofile: {arguments.out}",
        lambda: {
            "layers": list(map(asdict, profile.layers)),
            "host": profile.host and asdict(profile.host),
            "advice": list(map(asdict, advice)),
        },
    )
    return Exit.DONE


def measure_profile(config: RunConfig, rounds: int) -> Profile:
    """Every layer of the model on this device, on a microbatch of the run and on one sample.

    Raises:
        ValueError: a run that cannot be, or cannot be measured.
    """
    import torch
    from torch.utils import _pytree as pytree

    from pipetrain.comm.device import choose_device
    from pipetrain.data.dataset import make_data
    from pipetrain.engine.engine import precision_of
    from pipetrain.models.hf.source import bring_model
    from pipetrain.models.spec import make_spec, with_weights_in
    from pipetrain.runtime.cut import cut
    from pipetrain.runtime.profiling import profile_layers
    from pipetrain.trainer.links import measure_copies

    replicas = _replicas_to_measure(config)
    torch.set_num_threads(config.threads_per_rank)
    device, wait = choose_device(None), config.timeout_seconds
    precision = precision_of(config.precision, device)
    bring_model(config.model, timeout_seconds=wait)
    data = make_data(config.data, config.seed, own_tokenizer=config.model.path, timeout_seconds=wait)
    model = replace(config.model, dtype=config.model.dtype or WEIGHTS_IN[config.precision])
    spec = with_weights_in(make_spec(model, data.vocabulary_size, config.seed), precision.weights)
    batch = data.train.batch(0)
    inputs, targets = batch if spec.take_batch is None else spec.take_batch(*batch)
    m = replicas * config.pipeline.num_microbatches
    batch_size = config.data.global_batch_size

    def of(slices: int) -> tuple[LayerProfile, ...]:
        """Of the first microbatch of so many, which is the largest."""
        given, wanted = cut(inputs, slices)[0], cut(targets, slices, "targets")[0]
        return profile_layers(
            spec,
            given,
            pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), wanted),
            device=device,
            rounds=rounds,
            seed=config.seed,
            autocast=lambda: precision.context(device),
            say=say,
        )

    links, host = _measured_links(config), measure_copies(device)
    edges = () if links is None else links.edges
    return Profile(
        conditions=conditions_of(config),
        layers=of(m),
        samples=-(-batch_size // m),
        smaller=of(batch_size) if batch_size > m else (),
        link=min(edges, key=lambda link: link.bytes_per_second, default=None),
        edges=edges,
        host=host if links is None else replace(host, contention=links.contention),
        device=device.type,
    )


def _replicas_to_measure(config: RunConfig) -> int:
    """Raises ValueError: a run that cannot be, or cannot be measured."""
    check_run(config)
    check_engine(config)
    replicas = config.parallel.num_replicas
    if not isinstance(replicas, int):
        raise ValueError(
            f"parallel.num_replicas={replicas}: a profile is of microbatches of one size; give the number of replicas"
        )
    if config.model.compile:
        raise ValueError("model.compile=true: layers are measured as they are; use model.compile=false")
    return replicas


def _measured_links(config: RunConfig) -> Links | None:
    """The links of as many ranks of this machine as a replica has; none where they cannot be measured, which it says."""
    ranks = world_of(config.pipeline, config.parallel, config.cluster).ranks_per_replica // config.cluster.num_nodes
    if ranks < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="pipetrain-") as folder:
        file = Path(folder) / "links.json"
        with socket.create_server(("127.0.0.1", 0)) as free:  # where nobody else listens
            start = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}", f"--nproc-per-node={ranks}"]
        words = [sys.executable, "-m", "torch.distributed.run", *start, "-m", "pipetrain.trainer.links", str(file)]
        try:
            _run(words)
            found: Links = fitted(Links, json.loads(file.read_text()))
            return found
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            told = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            say(f"links were not measured, so a plan takes messages for free ({''.join(told)})")
            return None


def _run(words: Sequence[str]) -> None:
    """Raises SubprocessError: the command failed, or took too long; then its ranks are killed, too."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            told, failed = run.communicate(timeout=_LINK_SECONDS)
        except BaseException:
            run.terminate()  # torchrun ends its ranks
            raise
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, words, told, failed)


@dataclass(frozen=True)
class Advice:
    """Outputs worth keeping: `bytes_per_microbatch` more are held between F and B, and R of a step takes `seconds_per_step` less."""

    selective: str
    what: str
    bytes_per_microbatch: int
    seconds_per_step: float
    num_microbatches: int

    def __str__(self) -> str:
        held = self.bytes_per_microbatch
        return (
            f"keep {self.what}: {held / 1e6:.1f} MB more per microbatch in flight ({held * self.num_microbatches / 1e6:.1f} MB for all "
            f"{self.num_microbatches}), {self.seconds_per_step:.3g} s less R per step (recompute.selective=[{self.selective}])"
        )


def advice_of(profile: Profile, num_microbatches: int) -> list[Advice]:
    """What to keep, most seconds per byte first: each kind of expensive operation in each kind of layer."""
    found = []
    for layer in profile.layers:
        for word in sorted({op.word for op in layer.ops if op.word is not None}):
            ops = [op for op in layer.ops if op.word == word]
            held, seconds = sum(op.output_bytes for op in ops), sum(op.seconds for op in ops)
            if layer.kind == LOSS or not held or not seconds:
                continue
            for _, pairs in itertools.groupby(enumerate(layer.numbers), key=lambda pair: pair[1] - pair[0]):
                run = [number for _, number in pairs]  # that follow one another
                numbers = f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
                what = f"{word} outputs of layer{'s' * (len(run) > 1)} {numbers}"
                total = seconds * len(run) * num_microbatches
                found.append(Advice(f"{numbers}:{word}", what, held * len(run), total, num_microbatches))
    return sorted(found, key=lambda one: one.bytes_per_microbatch / one.seconds_per_step)


def _table(profile: Profile, advice: Sequence[Advice]) -> str:
    rows = []
    for layer in profile.layers:
        first, last, count = layer.numbers[0], layer.numbers[-1], len(layer.numbers)
        seconds = (layer.forward_seconds, layer.recompute_seconds, layer.backward_seconds)
        rows.append(
            (
                str(first) if count == 1 else f"{first}-{last} ({count})",
                layer.kind,
                *(f"{1e3 * taken:.3g} ms" for taken in seconds),
                *map(size, (layer.saved_bytes, layer.output_bytes, layer.parameter_bytes)),
                ", ".join(f"{one.op} {size(one.bytes)}" for one in layer.largest[:2]),
            )
        )
    head = ("layers", "kind", "F", "R", "B", "set", "output", "weights", "largest saved")
    told = [str(one) for one in advice[:_MOST_ADVICE]]
    if (host := profile.host) is not None:
        speeds = host.down_bytes_per_second, host.up_bytes_per_second, host.both_bytes_per_second
        down, up, both = (f"{one / 1e9:.3g} GB/s" for one in speeds)
        messages = f"; beside them a message takes {host.contention:.3g} times as long" if host.contention > 1 else ""
        told.append(f"copies to host memory {down}, back {up}, both at once {both} each{messages} (recompute.offload)")
    return "\n".join([Table(head, rows).as_text(), "", *told])
