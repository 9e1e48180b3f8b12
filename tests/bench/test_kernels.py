"""The profiler's trace, read: which op launched what, on which stream, and what ran beside it."""

import pytest

from benchmarks.replay.kernels import beside, kernels_in
from pipetrain.schedule.op import Op


def launch(correlation: int, at: float) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": at,
        "dur": 1,
        "args": {"correlation": correlation},
    }


def on_device(cat: str, name: str, correlation: int, stream: int, start: float, end: float) -> dict[str, object]:
    args = {"correlation": correlation, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def ranged(name: str, start: float, end: float) -> dict[str, object]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        ranged("0B0", 0, 10),
        ranged("0R1", 10, 20),
        ranged("ProfilerStep#1", 0, 30),
        launch(1, 5),
        launch(2, 12),
        launch(3, 14),
        launch(4, 15),  # a courier's, while the range of 0R1 is open
        launch(5, 25),  # of nobody
        on_device("kernel", "gemm", 1, 7, 100, 200),
        on_device("kernel", "gemm", 2, 20, 150, 250),
        on_device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3, 20, 250, 260),
        on_device("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4, 31, 240, 300),
        on_device("gpu_memset", "Memset", 5, 7, 300, 301),
    ]
}


def test_a_kernel_belongs_to_the_op_in_whose_range_it_was_launched() -> None:
    found = kernels_in(TRACE)
    assert [kernel.op for kernel in found] == [Op.parse("0B0"), Op.parse("0R1"), Op.parse("0R1"), None, None]
    assert [kernel.is_transfer for kernel in found] == [False, False, False, True, False]


def test_what_ran_beside_r() -> None:
    seen = beside(kernels_in(TRACE))
    assert seen.recompute_streams == {20}
    assert seen.compute_streams == {7}
    assert seen.recompute_seconds == pytest.approx(110e-6)
    assert seen.beside_transfers_seconds == pytest.approx(20e-6)
    assert seen.beside_compute_seconds == pytest.approx(50e-6)
    assert str(seen).startswith("R's kernels ran 0.1 ms on stream 20, F's and B's on 7; 0.0 ms of R beside transfers")
