"""What can be wrong when ranks of several machines meet: found in time, and said in a line."""

import shutil
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from machines import ROOT, RUN, end, environment, start
from ranks import PATIENCE_SECONDS
from small_text import make_text
from torch.distributed import PrefixStore, Store, TCPStore

from pipetrain.comm import address, torch_distributed
from pipetrain.comm.address import Unreachable, check_a_port_is_free, interface_to, listener_at, wait_for
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.torch_distributed import Versions, check_same, own_versions, store_of_this_attempt


def taken() -> socket.socket:
    """A port on which something listens."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Addresses ------------------------------------------------------------------------------------------------------------


def test_an_address_that_answers_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines do not start at the same moment."""
    port = unused_port()
    listener = socket.socket()
    retries: list[float] = []

    def start(seconds: float) -> None:
        """The other machine does, while this one waits to try again."""
        retries.append(seconds)
        listener.bind(("127.0.0.1", port))
        listener.listen()

    monkeypatch.setattr(address.time, "sleep", start)
    wait_for("127.0.0.1", port, PATIENCE_SECONDS)
    assert len(retries) == 1
    listener.close()


def test_an_address_that_does_not_answer() -> None:
    port = unused_port()
    with pytest.raises(Unreachable) as caught:
        wait_for("127.0.0.1", port, 1.0)
    text = str(caught.value)
    assert text.startswith(f"127.0.0.1:{port}, where the ranks meet, could not be reached from 127.0.0.1 of ")
    assert "within 1 s (Connection refused): rank 0's machine did not start" in text


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(Unreachable, match=r"no-such-host.invalid:29500.*knows no address of no-such-host.invalid"):
        wait_for("no-such-host.invalid", 29500, 0.1)


def test_a_port_that_is_taken() -> None:
    with taken() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Unreachable, match=rf"cannot listen at 127.0.0.1:{port}.*Address already in use.*older run"):
            listener_at("127.0.0.1", port)
    check_a_port_is_free()


def test_nobody_listens_at_other_addresses_than_that_of_the_rendezvous() -> None:
    port = unused_port()
    listener = listener_at("127.0.0.1", port)
    assert listener is not None
    with listener:
        assert listener.getsockname() == ("127.0.0.1", port)
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")


def test_a_name_that_leads_to_the_loopback_chooses_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /etc/hosts of some systems has the machine's own name: the other machines know it by another address."""
    there = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9))]
    monkeypatch.setattr(address.socket, "getaddrinfo", lambda *_args, **_named: there)
    assert interface_to("node1") is None
    assert listener_at("node1", unused_port()) is None


def test_ranks_that_were_not_told_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="RANK is set and MASTER_ADDR is not: start the ranks with torchrun"):
        store_of_this_attempt(timedelta(seconds=1))


# Versions -------------------------------------------------------------------------------------------------------------


def told_to(store: Store, rank: int, num_ranks: int, versions: Versions) -> str:
    try:
        check_same(store, rank, num_ranks, versions)
    except (ValueError, PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare(found: list[Versions], num_ranks: int, seconds: float) -> list[str]:
    """What each rank is told; "" where it may go on."""
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    told = [""] * len(found)
    connected = threading.Barrier(len(found))

    def rank(number: int) -> None:
        # torch looks the name of whoever connects up: with a slow name server that alone takes seconds.
        store = TCPStore("127.0.0.1", server.port, None, is_master=False, timeout=timedelta(seconds=PATIENCE_SECONDS))
        connected.wait()  # so that none has less of `seconds` than another
        store.set_timeout(timedelta(seconds=seconds))
        told[number] = told_to(store, number, num_ranks, found[number])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_equal_versions_go_on() -> None:
    assert compare([own_versions()] * 4, 4, PATIENCE_SECONDS) == [""] * 4


@pytest.mark.parametrize("name", ["python", "torch", "pipetrain", "NCCL"])
def test_versions_that_differ_are_told_the_same_on_every_rank(name: str) -> None:
    ours = {**own_versions(), "NCCL": "2.27.7"}
    told = compare([ours, ours, {**ours, name: "0.0.1"}], 3, PATIENCE_SECONDS)
    assert told[0] == told[1] == told[2]
    host = socket.gethostname()
    assert told[0].startswith("ValueError: the machines of this run have different versions: ")
    assert f"{host} has {name} {ours[name]} (rank 0)" in told[0]
    assert f"{host} has {name} 0.0.1 (rank 2)" in told[0]
    assert len(told[0].splitlines()) == 1


def test_a_library_that_one_machine_lacks() -> None:
    ours = own_versions()
    told = compare([ours, {**ours, "NCCL": "2.27.7"}], 2, PATIENCE_SECONDS)
    assert "has NCCL none" in told[1]
    assert "has NCCL 2.27.7" in told[1]


def test_who_hosts_the_store_stays_until_all_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that loses the message: rank 0 knows it and leaves with the store before rank 1 has asked."""
    decided = threading.Event()  # rank 0 has left, or has said that it stays

    class Ordered(PrefixStore):
        def get(self, key: str) -> bytes:
            if key == "verdict" and threading.current_thread() is late:
                assert decided.wait(PATIENCE_SECONDS)
            return super().get(key)

        def wait(self, *args: Any) -> None:
            if threading.current_thread() is not late:
                decided.set()
            super().wait(*args)

    monkeypatch.setattr(torch_distributed, "PrefixStore", Ordered)
    patience = timedelta(seconds=PATIENCE_SECONDS)
    stores = [TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=patience)]
    stores.append(TCPStore("127.0.0.1", stores[0].port, None, is_master=False, timeout=patience))
    told = {}

    def rank(number: int) -> None:
        told[number] = told_to(stores[number], number, 2, {"torch": str(number)})

    late = threading.Thread(target=rank, args=(1,))
    late.start()
    rank(0)
    del stores[0]  # with it the server ends, as with rank 0's process
    decided.set()
    late.join()
    assert told[0].startswith("ValueError: the machines of this run have different versions: ")
    assert told[1] == told[0]


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named() -> None:
    told = compare([own_versions()] * 2, 4, 1.0)
    for text in told:
        assert text.startswith("PipelineError: 2 of 4 ranks did not come within 1 s (timeout_seconds): rank 2, 3;")


@pytest.mark.slow
def test_ranks_with_other_sources_end_with_code_2(tmp_path: Path) -> None:
    """Two whole ranks, one of them from a checkout that has been changed: the same line and code from both."""
    make_text(tmp_path / "text")
    changed = tmp_path / "checkout"
    shutil.copytree(ROOT / "pipetrain", changed / "pipetrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", changed / "conf")
    with (changed / "pipetrain" / "train.py").open("a") as file:
        file.write("# not the same\n")
    words = [sys.executable, "-m", "pipetrain.train", *RUN, "pipeline.num_stages=2"]
    words.append(f"timeout_seconds={PATIENCE_SECONDS}")
    ranks, port = [], str(unused_port())
    for rank, package in enumerate((ROOT, changed)):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(start(words, tmp_path, {**environment(package), **place, **meeting}))
    ended = [(stderr.splitlines()[-1], code) for code, stderr in map(end, ranks)]
    assert ended[0] == ended[1]
    line, code = ended[0]
    assert code == 2
    assert line.startswith("pipetrain: the machines of this run have different versions: ")
    assert line.count(" has pipetrain 0.1.0 (sources ") == 2
