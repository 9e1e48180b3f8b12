"""`plan.cluster`: which machines a word means, and the one line that a wrong word gets."""

import pytest

from pipetrain.plan.cluster import parse_cluster


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
