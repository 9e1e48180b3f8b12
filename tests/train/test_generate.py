"""`pipetrain generate` as a user types it: what it prints, on how many ranks, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import runpy
import shutil
import sys
from dataclasses import asdict

import pytest
from commands import complete

from pipetrain.cli import generate_command
from pipetrain.cli.main import main
from pipetrain.config.load import as_yaml, load_config
from pipetrain.data.tokenizer import ByteTokenizer
from pipetrain.launcher.outcome import Exit, Outcome
from pipetrain.models.spec import make_spec
from pipetrain.models.weights import write_shard
from pipetrain.monitor.folder import RunFolder
from pipetrain.plan.plan import make_plan
from pipetrain.train import train
from pipetrain.trainer.generate import TextStream, _Writer

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATE = [sys.executable, "-m", "pipetrain.cli", "generate"]


def a_run(folder: pathlib.Path, options: list[str], num_layers: int) -> RunFolder:
    """What a run over two ranks leaves behind, but for its weights."""
    run = RunFolder(folder)
    run.create()
    run.config.write_text(as_yaml(load_config(options)))
    run.plan.write_text(json.dumps(asdict(make_plan(num_layers, num_ranks=2))))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model of the quickstart's kind that has learnt nothing."""
    folder = a_run(tmp_path_factory.mktemp("runs") / "run", ["experiment=smoke"], 4)
    spec = make_spec(load_config(["experiment=smoke"]).model, 256)
    tensors = {
        f"{number}.{name}": tensor
        for number, layer in enumerate(spec.build(0, 4, seed=3))
        for name, tensor in layer.state_dict().items()
    }
    write_shard(folder.weights / "model.safetensors", spec.to_file(tensors))
    return folder.path


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    llama, chats = folder / "small-llama", folder / "chats.jsonl"
    runpy.run_path(str(ROOT / "docs" / "small_llama.py"))["main"](str(llama), str(chats), 20, 2, 32)
    options = ["experiment=finetune", "precision=fp32", f"model.path={llama}", f"data.path={chats}"]
    run = a_run(folder / "run", options, 4)
    shutil.copytree(llama, run.model)
    (run.model / "model.safetensors").rename(run.weights / "model.safetensors")
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str | pathlib.Path) -> str:
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_two_ranks_say_what_one_says(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the last word, which they are to stop before."""
    options = ["--prompt=the ", "--tokens=40", "--temperature=0.9", "--top-k=30", "--top-p=0.95", "--seed=4"]
    whole = said(capsys, run, *options, "--ranks=1").removesuffix("\n")
    stop = re.findall(r"[!-~]+", whole)[-1]
    over_two = complete(run, [*GENERATE, str(run), *options, f"--stop={stop}"])
    assert over_two.returncode == 0, over_two.stderr
    assert over_two.stdout.removesuffix("\n") == whole[: whole.index(stop, 4)]
    assert over_two.stdout.startswith("the ")
    assert over_two.stderr == ""


def test_a_text_ends_before_a_stop(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several prompts each by itself."""
    options = ["--tokens=40", "--temperature=0.9", "--seed=4", "--ranks=1"]
    first, second = ["--prompt=the "], ["--prompt=the ", "--prompt=import "]
    whole = said(capsys, run, *first, *options).removesuffix("\n")
    stop = re.findall(r"[!-~]+", whole[4:])[1]  # of all that bytes say, something that a terminal takes
    expected = whole[: whole.index(stop, 4)]
    stops = [f"--stop={stop}", "--stop=never said by a model of bytes"]
    assert said(capsys, run, *first, *stops, *options) == f"{expected}\n"
    assert said(capsys, run, *second, *stops, *options).startswith(f"{expected}\n\nimport ")


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("abcd", ["bc"], "a"),
        ("abdc", ["bc"], "abdc"),  # held back for a token
        ("abab", ["bac", "aba"], ""),
        ("xayb", ["yb", "ay"], "x"),  # the one that comes first
        ("ab", ["bc"], "ab"),  # held back to the end
    ],
)
def test_what_may_begin_a_stop_is_held_back(text: str, stops: list[str], shown: str) -> None:
    written: list[str] = []
    writer = _Writer(ByteTokenizer(), [""], stops, written.append)
    for token in text.encode():
        if writer.on_token(0, token):
            break
    writer.end()
    assert "".join(written) == f"{shown}\n"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three steps that change much, and the snapshots after the second and the third."""
    path = tmp_path_factory.mktemp("saved") / "run"
    options = ["experiment=smoke", "steps=3", "optim.learning_rate=0.1", "optim.warmup_steps=0", "snapshot.keep_last=2"]
    done = train(load_config([*options, "snapshot.every_steps=1", "observe.progress=false", f"run_dir={path}"]))
    assert done.code is Exit.DONE
    return path


def test_a_run_that_has_not_ended_speaks_from_a_snapshot(
    saved_run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt=the ", "--tokens=30", "--temperature=0.9", "--ranks=1"]
    texts = [said(capsys, saved_run, *options, *more) for more in ([], ["--step=2"], ["--step=3"])]
    assert texts[2] == texts[0] != texts[1]
    run = pathlib.Path(shutil.copytree(saved_run, tmp_path / "run"))
    shutil.rmtree(run / "weights")
    assert main(["generate", str(run), *options]) == 0
    told = capsys.readouterr()
    assert told.out == texts[0]
    assert told.err == f"pipetrain: the run has not ended; generating from {run}/snapshots/step-00000003\n"
    assert main(["generate", str(run), "--step=1", *options]) == 2
    assert "--step=1: " in (error := capsys.readouterr().err)
    assert "has no such snapshot; there are 2, 3" in error
    (run / "snapshots" / "step-00000003" / "manifest.json").write_text("{}")
    assert main(["generate", str(run), *options]) == 0  # from the one before, as a resume does
    told = capsys.readouterr()
    assert told.out == texts[1]
    assert "set aside" in told.err


def test_ranks_that_nobody_launched_are_told_which_snapshot(
    saved_run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More may be saved while they start."""
    run = RunFolder(pathlib.Path(shutil.copytree(saved_run, tmp_path / "run")))
    shutil.rmtree(run.weights)
    with pytest.raises(ValueError, match=r"has only snapshots, .* choose one with --step=N on all ranks"):
        generate_command._weights(run, None, is_rank=True)
    chosen = generate_command._weights(run, None)
    launched: list[str] = []
    monkeypatch.setattr(
        generate_command, "launch", lambda _, words, **__: launched.extend(words) or Outcome(0, Exit.DONE)
    )
    assert main(["generate", str(run.path), "--ranks=2"]) == 0
    assert launched[-1] == "--step=3"
    assert generate_command._weights(run, 3, is_rank=True) == chosen == run.path / "snapshots" / "step-00000003"


def test_a_question_is_answered_as_transformers_does(
    chat_run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    question = "What is abc.abstractmethod for?"
    tokenizer = AutoTokenizer.from_pretrained(chat_run / "small-llama")
    model = AutoModelForCausalLM.from_pretrained(chat_run / "small-llama", dtype="float32").eval()
    options = ["--temperature=0", "--tokens=12", "--ranks=1", f"--prompt={question}"]

    def answer(messages: list[dict[str, str]]) -> str:
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True) + "\n"

    user = {"role": "user", "content": question}
    assert said(capsys, chat_run / "run", *options) == answer([user])
    with_system = said(capsys, chat_run / "run", *options, "--system=Be brief.")
    assert with_system == answer([{"role": "system", "content": "Be brief."}, user])
    raw = tokenizer("abc", return_tensors="pt")
    text = model.generate(**raw, max_new_tokens=5, do_sample=False)[0, raw["input_ids"].shape[1] :]
    assert said(capsys, chat_run / "run", "--raw", "--temperature=0", "--tokens=5", "--ranks=1", "--prompt=abc") == (
        "abc" + tokenizer.decode(text, skip_special_tokens=True) + "\n"
    )


def test_without_transformers_a_line_says_so(
    chat_run: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    run = str(chat_run / "run")
    for words in (["export", run, f"--out={chat_run / 'out'}"], ["generate", run, "--ranks=1", "--prompt=a"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "transformers" in error
        assert "not installed" in error
        assert error.count("\n") == 1
    assert not (chat_run / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt="], "--prompt is empty"),
        (["--prompt=a\udcff"], "--prompt has bytes that are not UTF-8"),
        (["--tokens=0"], "--max-new-tokens=0: at least 1"),
        (["--temperature=-1"], "temperature=-1"),
        (["--temperature=0", "--top-k=3"], "temperature=0 takes the likeliest"),
        (["--top-p=2"], "top_p=2"),
        (["--ranks=0"], "--ranks=0: at least 1"),
        (["--ranks=9"], "4 layers cannot fill 9 stages"),
        (["--ranks=1", "--system=x"], "--system=x: byte has no chat template"),
    ],
)
def test_mistakes(run: pathlib.Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_character_is_told_when_it_is_whole_and_what_is_none_at_last() -> None:
    stream, text = TextStream(ByteTokenizer()), "a\nö€𝄞z"
    parts = [stream.add(token) for token in text.encode()]
    assert parts == ["a", "\n", "", "ö", "", "", "€", "", "", "", "𝄞", "z"]
    assert stream.rest() == ""
    for tokens, told in (
        (b"\xf0\x9f", "\N{REPLACEMENT CHARACTER}"),
        (b"\xff" * 9 + b"a", "\N{REPLACEMENT CHARACTER}" * 9 + "a"),
    ):
        stream = TextStream(ByteTokenizer())
        assert "".join(map(stream.add, tokens)) + stream.rest() == told
