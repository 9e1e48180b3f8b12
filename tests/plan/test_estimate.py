"""Estimates from sizes and a table of devices, held against what others measured and published; which machines a word of `plan.cluster` means."""

import itertools

import pytest
from decoders import LLAMA_8B, LLAMA_70B, LLAMA_405B, llama, profile_of

from pipetrain.models.hf.hf_size import HfShape, hf_size_of
from pipetrain.plan.cluster import parse_cluster
from pipetrain.plan.estimate import Estimator
from pipetrain.plan.footprint import Holdings
from pipetrain.plan.foreign import PEERS, Option, Pricing, layer_groups
from pipetrain.plan.profile import LayerProfile, Profile
from pipetrain.plan.space import PlanProblem
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.make import make
from pipetrain.schedule.simulate import simulate

GIB = 2**30
H100_PEAK = 989.4e12
GRAND_TETON = "64x8xh100-96gb+nvlink+ib400"  # the machines of torchtitan's benchmarks


def seconds_per_token(profile: Profile, *, recompute: float) -> float:
    """Of one device that has all layers; `recompute`: the share of R of decoder layers that runs inside B."""
    assert profile.samples is not None
    return sum(
        len(one.numbers)
        * (one.forward_seconds + one.backward_seconds + recompute * one.recompute_seconds * (one.kind == "decoder"))
        for one in profile.layers
    ) / (profile.samples * 8192)


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 4: tokens/s per GPU. Selective recomputation of Llama 8B runs every
# second product of matrices again, and not attention: about half of R. Full recomputation of 70B runs all of it.
FITTED = [
    (LLAMA_8B, "8xh100-96gb+nvlink", 1, False, 0.5, 6667),
    (LLAMA_8B, "8xh100-96gb+nvlink", 1, True, 0.5, 8532),
    (LLAMA_70B, "32x8xh100-96gb+nvlink+ib400", 8, True, 1.0, 829),
]


@pytest.mark.parametrize(("sizes", "cluster", "tensor", "float8", "recompute", "measured"), FITTED)
def test_efficiencies_are_fitted_to_what_was_measured(
    sizes: HfShape, cluster: str, tensor: int, float8: bool, recompute: float, measured: int
) -> None:
    profile = profile_of(sizes, cluster, tensor, float8=float8)
    assert 1 / seconds_per_token(profile, recompute=recompute) / tensor == pytest.approx(measured, rel=0.08)


def titan_plan(order: str, per_rank: int) -> tuple[float, float]:
    """Tokens/s per GPU and GiB of the fullest rank of 405B on 512 H100: 8 stages x 8 tensor ranks x 8 replicas, 8 microbatches of 4 samples
    (its default are as many as pipeline ranks), full recomputation, layers cut as `generate_split_points` did.
    """
    stages = 8 * per_rank
    base, more = divmod(126, stages)
    balance = (base + 1, *[base + 1] * more, *[base] * (stages - more - 2), base + 1)  # with embedding and head
    option = Option(order, order, 8, 8, 8, balance, "", "", layer_groups(balance, 1))
    held = {"parallel.num_replicas": 8, "pipeline.num_microbatches": 8}
    holdings = Holdings(casts=True, on_cuda=True)
    profile = profile_of(LLAMA_405B, GRAND_TETON, 8, float8=True)
    pricing = Pricing(PlanProblem(profile, 256, 64, 8, 8, held=held, holdings=holdings), PEERS["torchtitan"])
    schedule = make(pricing.spec(option))
    seconds = simulate(schedule, pricing.costs(option)).step_seconds
    peak = max(rank.total for rank in pricing.memory(option, schedule))
    return 256 * 8192 / seconds / 512, peak / GIB


def test_405b_on_512_h100_by_torchtitan() -> None:
    """The same file, table 5: 1F1B 100 tokens/s per GPU and 82.5 GiB, interleaved 128 and 72.7 GiB.

    Both are estimated slower, by 10 to 15 %: asynchronous tensor parallelism hides messages that are counted here. Both are estimated
    smaller, by 12 to 15 %: what was measured is what the allocator reserved, with its fragments.
    """
    speed, memory = titan_plan("1f1b", 1)
    interleaved_speed, interleaved_memory = titan_plan("interleaved", 2)
    assert interleaved_speed > speed
    assert interleaved_memory < memory
    assert (speed, interleaved_speed) == (pytest.approx(100, rel=0.2), pytest.approx(128, rel=0.2))
    assert (memory, interleaved_memory) == (pytest.approx(82.5, rel=0.2), pytest.approx(72.7, rel=0.2))


def llama_mfu(nodes: int, replicas: int, microbatches: int) -> float:
    """Of 16 ranks x 8 stages of one layer, embedding and head among them, x 8 tensor ranks: interleaved, no recomputation."""
    option = Option("interleaved", "", replicas, 16, microbatches, (1,) * 128, "", "", ((),) * 128)
    profile = profile_of(LLAMA_405B, f"{nodes}x8xh100-80gb+nvlink+ib400", 8)
    pricing = Pricing(
        PlanProblem(profile, replicas * microbatches, 16 * replicas, microbatches, replicas), PEERS["megatron"]
    )
    seconds = simulate(make(pricing.spec(option)), pricing.costs(option)).step_seconds
    flops = hf_size_of(LLAMA_405B.config, 8192).flops_per_token
    assert flops is not None
    return microbatches * 8192 / seconds / 16 / 8 * flops / H100_PEAK


def test_405b_on_8192_and_16384_h100_by_llama() -> None:
    """arXiv 2407.21783, table 4: 43 % and 41 % with 32 and 16 samples per replica.

    Both are estimated lower, by 11 and 13 %: efficiencies come from GPUs with a limit of 500 W, and these had 700 W.
    """
    small, large = llama_mfu(1024, 64, 32), llama_mfu(2048, 128, 16)
    assert large < small
    assert (small, large) == (pytest.approx(0.43, rel=0.2), pytest.approx(0.41, rel=0.2))


TOY = llama(4, 512, 16, 1024, 1000)


def of_decoder(tensor: int, samples: int = 2, cluster: str = "8xh100-80gb+nvlink") -> LayerProfile:
    profile = Estimator(TOY, parse_cluster(cluster), 64, tensor).profile()
    return profile.at(samples).layer(1)


def test_tensor_ranks_share_flops_parameters_and_activations() -> None:
    whole, share = of_decoder(1), of_decoder(4)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "inner_bytes", "input_bytes", "output_bytes"):
        assert getattr(share, name) == pytest.approx(getattr(whole, name) / 4, rel=1e-6)
    assert (
        whole.forward_seconds / 4 < share.forward_seconds < whole.forward_seconds
    )  # and an all-reduce per half of the block
    slow = of_decoder(4, cluster="8xh100-80gb+pcie5")
    reduced = 4 * 3 / 4 * 2 * 64 * 512 * 2  # bytes that leave a rank
    gained = reduced / 0.8 * (1 / 64e9 - 1 / 450e9)
    assert slow.forward_seconds - share.forward_seconds == pytest.approx(gained, rel=1e-6)


def test_layers_have_the_parameters_and_flops_of_the_model() -> None:
    profile = Estimator(TOY, parse_cluster("1xh100-80gb"), 64, precision="bf16-true").profile()
    size = hf_size_of(TOY.config, 64)
    assert profile.num_layers == size.num_layers
    assert size.parameters_per_layer is not None
    norms = [0, *[2 * 512] * 4, 512]
    numbers = [profile.layer(n).parameter_bytes // 2 for n in range(profile.num_layers)]
    assert numbers == [a + b for a, b in zip(size.parameters_per_layer, norms)]


def test_microbatches_of_other_sizes_lie_on_a_line() -> None:
    one, two, eight = (of_decoder(1, samples) for samples in (1, 2, 8))
    assert two.forward_seconds == pytest.approx(2 * one.forward_seconds)
    assert eight.inner_bytes == 8 * one.inner_bytes
    assert eight.parameter_bytes == one.parameter_bytes


def test_messages_between_machines_take_the_network() -> None:
    within, between = (
        costs_of_layers(Estimator(TOY, parse_cluster(cluster), 64).profile(), (3, 3)).hop_forward[0]
        for cluster in ("8xh100-80gb+nvlink", "2x8xh100-80gb+nvlink+ib400")
    )
    assert between - within == pytest.approx(2 * 64 * 512 * 2 / 0.8 * (1 / 50e9 - 1 / 450e9))


def test_a_sliding_window_takes_less_attention() -> None:
    windowed = HfShape({**TOY.config, "sliding_window": 16})
    cluster = parse_cluster("1xh100-80gb")
    full, cut = (Estimator(sizes, cluster, 64).profile().layer(1) for sizes in (TOY, windowed))
    assert cut.forward_seconds < full.forward_seconds
    assert cut.inner_bytes == full.inner_bytes


@pytest.mark.parametrize(
    ("tensor", "precision", "cluster", "says"),
    [
        (3, "fp32", "8xh100-80gb", "plan.tensor=3: .* allowed are 1, 2, 4, 8"),
        (16, "fp32", "2x8xh100-80gb+nvlink+ib400", "plan.tensor=16"),
        (1, "bf16-true", "2xcpu-4gb", "precision=bf16-true: cpu-4gb .* precision=fp32"),
    ],
)
def test_what_the_devices_cannot_do(tensor: int, precision: str, cluster: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Estimator(TOY, parse_cluster(cluster), 64, tensor, precision)


def test_every_kind_of_device_has_an_estimate() -> None:
    words = ("h100-80gb", "h200-141gb", "b200-180gb", "a100-80gb", "l40s-48gb", "mi300x-192gb", "cpu-16gb")
    steps = [
        seconds_per_token(Estimator(TOY, parse_cluster(f"1x{word}"), 8192, precision="fp32").profile(), recompute=0)
        for word in words
    ]
    fastest_first = sorted(range(len(words)), key=steps.__getitem__)
    assert (words[fastest_first[0]], words[fastest_first[-1]]) == ("mi300x-192gb", "cpu-16gb")
    assert all(a != b for a, b in itertools.pairwise(steps))


# `plan.cluster` --------------------------------------------------------------------------------------------------------


def test_a_word_names_machines_devices_and_links() -> None:
    cluster = parse_cluster("16x8xh100-80gb+nvlink+ib400")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (16, 8, 128)
    assert (cluster.device.name, cluster.device.memory_bytes // 2**20) == ("h100-80gb", 81_559)
    assert (cluster.link, cluster.network) == (450e9, 50e9)
    assert cluster.bandwidth(within_node=True) == pytest.approx(0.8 * 450e9)
    assert cluster.bandwidth(within_node=False) == pytest.approx(0.8 * 50e9)


def test_one_machine_needs_no_network_and_has_its_usual_link() -> None:
    assert parse_cluster("8xL40S-48gb").link == 32e9
    assert parse_cluster("8xh100-80gb+pcie5").link == 64e9
    cpu = parse_cluster("2xcpu-3gb").device
    assert (cpu.name, cpu.memory_bytes) == ("cpu-3gb", 3 * 2**30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8h100", ("cannot be read", "16x8xh100-80gb+nvlink+ib400", "nearest device is h100-80gb")),
        ("0xh100-80gb", ("cannot be read",)),
        ("8xh100-80gb+nvlink+400", ("cannot be read",)),
        ("8xh10-80gb", ("h10 is not in the table", "mi300x", "nearest device is h100-80gb")),
        ("8xl40-48gb", ("nearest device is l40s-48gb",)),
        ("8xabacus-1gb", ("abacus is not in the table",)),
        ("8xh100+nvlink", ("memory of h100 is missing", "h100-80gb or h100-96gb")),
        ("2xcpu", ("memory of cpu is missing", "cpu-16gb")),
        ("8xa100-90gb", ("there is no a100-90gb", "a100-40gb or a100-80gb")),
        ("8xl40s-48gb+nvlink", ("the links of l40s-48gb are pcie4",)),
        ("2x8xh100-80gb+nvlink", ("network between its 2 machines", "2x8xh100-80gb+nvlink+ib400")),
    ],
)
def test_a_wrong_word_gets_one_line(text: str, says: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^plan\.cluster=") as error:
        parse_cluster(text)
    assert "\n" not in str(error.value)
    assert [part for part in says if part not in str(error.value)] == []
