"""Keys of earlier versions load, with one line each, and a run that was made with them goes on."""

import warnings
from collections.abc import Iterator

import pytest

from pipetrain.cli.main import main
from pipetrain.config import renamed
from pipetrain.config.load import load_config
from pipetrain.config.renamed import current_overrides, current_values
from pipetrain.config.schema import keys


def test_every_old_key_is_gone_and_every_new_one_is_there() -> None:
    now = keys()
    for old, new in renamed._KEYS.items():
        assert old not in now
        assert new in now or " / " in new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data.batch_size=32", "data.global_batch_size=32"),
        ("precision=bf16", "precision=bf16-true"),
        ("data.counted=answers", "data.assistant_only_loss=true"),
        ("data.counted=last", "data.assistant_only_loss=last"),
        ("parallel.zero=1", "parallel.zero_stage=1"),
    ],
)
def test_an_old_override_is_a_new_one_and_one_line(old: str, new: str) -> None:
    lines: list[str] = []
    assert current_overrides([old, "steps=3"], lines.append) == [new, "steps=3"]
    assert lines == [f"{old}: this is {new} now"]
    assert current_overrides([new], lines.append) == [new]
    assert len(lines) == 1
    with pytest.warns(UserWarning, match=f"this is {new} now"):
        was = load_config([old])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert was == load_config([new])


def test_a_command_tells_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "model.num_blocks=4", "pipeline.num_stages=2", "--json"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "num_blocks" in line]
    assert told == ["pipetrain: model.num_blocks=4: this is model.num_hidden_layers=4 now"]


def test_old_values_of_a_file_win_over_new_defaults() -> None:
    def both_ways() -> Iterator[dict[str, object]]:
        old, new = ("batch_size", 4), ("global_batch_size", 16)
        yield dict([old, new])
        yield dict([new, old])

    for data in both_ways():
        assert current_values({"data": data}) == {"data": {"global_batch_size": 4}}
    phases = [{"from": 0}, {"from": 5, "data": {"batch_size": 32}}]
    now = current_values({"seed": 1, "phases": phases, "precision": "bf16_autocast", "data": {"counted": "all"}})
    assert now == {
        "seed": 1,
        "phases": [{"from": 0}, {"from": 5, "data": {"global_batch_size": 32}}],
        "precision": "bf16-mixed",
        "data": {"assistant_only_loss": False},
    }
