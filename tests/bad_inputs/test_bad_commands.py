"""A wrong call of `pipetrain show`, `report` or `generate` gets one line that helps; no two rows of wrong input are the same."""

import pytest
from bad_rows import Check, Row, a_run, file_at
from test_bad_config import CONFIG, RANGES, TOGETHER
from test_bad_data import DATA
from test_bad_folders import HARMED, RUN_FOLDERS, SNAPSHOTS

COMMANDS = [
    Row("trian steps=3", ("trian: there is no such command", "train")),
    Row("show cost.forward_seconds=[1,2,3] pipeline.num_stages=2", ("cost.forward_seconds has 3 numbers", "or 2")),
    Row(
        "show cost.weight_gradient_seconds=[1,2,3] pipeline.num_stages=2",
        ("cost.weight_gradient_seconds has 3 numbers", "or 2"),
    ),
    Row("show cost.hop_seconds=-1", ("cost.hop_seconds",)),
    Row("show recompute.mode=never_", ("recompute.mode", "'never'")),
    Row("show --against=recompute.mod=inline", ("recompute.mod:", "'recompute.mode'")),
    Row("show pipeline.schedule={}/nowhere.csv", ("nowhere.csv",)),
    Row("show pipeline.schedule={}/bad.csv pipeline.num_stages=2", ("bad.csv",), file_at("bad.csv", b"0F0,what\n")),
    Row("show --out={}/x.bmp pipeline.num_stages=2", ("bmp", "svg")),
    Row("show --out={}/nowhere/x.svg pipeline.num_stages=2", ("nowhere",)),
    Row("plan plan.cluster=8xh10-80gb", ("plan.cluster=8xh10-80gb", "nearest device is h100-80gb")),
    Row("plan plan.cluster=8xh100+nvlink", ("plan.cluster", "memory of h100 is missing", "h100-80gb")),
    Row("plan plan.cluster=8h100", ("plan.cluster=8h100: cannot be read", "8xh100-80gb+nvlink")),
    Row("plan plan.cluster=8xh100-80gb plan.tensor=3", ("plan.tensor=3", "1, 2, 4, 8")),
    Row("plan plan.cluster=2xcpu-4gb precision=bf16-true", ("precision=bf16-true", "precision=fp32")),
    Row("plan plan.cluster=2xcpu-4gb plan.profile=latest", ("plan.profile=latest", "plan.cluster")),
    Row("train plan.cluster=2xcpu-4gb", ("plan.cluster=2xcpu-4gb", "`pipetrain plan` alone reads")),
    Row("plan plan.tensor=2", ("plan.tensor=2", "plan.cluster")),
    Row("plan --for=megatorn", ("--for='megatorn'", "torchtitan, megatron, deepspeed", "'megatron'")),
    Row("plan --csv={}/order.csv", ("--csv", "--for=torchtitan")),
    Row("report {}/nowhere", ("there is no run",)),
    Row("report {}/run", ("report",), a_run),
    Row("generate {}/nowhere", ("there is no run",)),
    Row("generate {}/run", ("weights",), a_run),
]

ROWS = [*CONFIG, *RANGES, *TOGETHER, *DATA, *RUN_FOLDERS, *SNAPSHOTS, *HARMED, *COMMANDS]


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.name)
def test_the_answer_is_one_line_that_helps(row: Row, check: Check) -> None:
    check(row)


def test_rows_are_distinct() -> None:
    assert len(ROWS) >= 60
    assert len({(row.name, row.says) for row in ROWS}) == len(ROWS)
