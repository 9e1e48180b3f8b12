"""Random files of somebody else, of every kind that a command reads: exit 0, 1 or 2 with one line, no traceback, and nothing written outside.

Each is a good file with some damage: bytes put in place of others, values of JSON in place of others, with checksums made good again where
there are some, so that what lies behind them is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from foreign import SECONDS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small_text import make_text
from tiny_tokenizer import save_tokenizer

from pipetrain.cli import train_command
from pipetrain.cli.main import main
from pipetrain.launcher.outcome import Outcome
from pipetrain.snapshot.files import canonical_json
from pipetrain.snapshot.manifest import NAME
from pipetrain.train import main as rank

TRAINED = (
    "experiment=smoke data=text data.path={}/corpus pipeline.num_stages=1 steps=2 snapshot.every_steps=2 "
    "observe.progress=false"
)
SNAPSHOT = "snapshots/step-00000002"
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}

# Damage ---------------------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from(
        [
            *(b"\x1b[2J\x1b]0;x\x07", b"\xff\xfe", b"\0", b"\n", b'"', b"{", b"}", b"]", b",", b": ", b"- "),
            *(b"[" * 3000, b'{"a":' * 300, b"9" * 5000, b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b'""'),
            *(b"../../x", b"/etc/passwd", b"${oc.env:HOME}", b"&a [*a]", b"*a", b"!!python/object:os.system"),
            *(b"{{ 9**(9**9) }}", b"{% for a in range(10**9) %}", b"{% endfor %}", "\u202e\ud7ff".encode()),
            *(b"0F0,0B0\n", b"1R99999", b"0F", b";", b"0" * 300),
        ]
    ),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 0, 2**63, "../x", "\x1b[2J", "9" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def bytes_of(draw: st.DrawFn, good: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(good)))
        length = draw(st.sampled_from([0, 1, 4, 40, len(good)]))
        good = good[:first] + draw(PIECES) + good[first + length :]
    return good


def json_of(draw: st.DrawFn, good: bytes) -> bytes:
    """Some values replaced, left out or added, wherever they stand."""
    document = [json.loads(good)]
    for _ in range(draw(st.integers(1, 3))):
        held: Any = document
        place: Any = 0
        for _ in range(draw(st.integers(0, 4))):
            inside = held[place]
            if not isinstance(inside, dict | list) or not inside:
                break
            held = inside
            place = draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
        if isinstance(held, dict) and draw(st.booleans()):
            del held[place]
            place = draw(st.text(max_size=4))
        held[place] = draw(VALUES)
    return json.dumps(document[0]).encode()


def lines_of(draw: st.DrawFn, good: bytes) -> bytes:
    lines = good.splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = json_of(draw, lines[place])
    return b"\n".join(lines) + b"\n"


def header_of(draw: st.DrawFn, good: bytes) -> bytes:
    """Of safetensors: the length of the header in 8 bytes, the header as JSON, the tensors."""
    length = int.from_bytes(good[:8], "little")
    header = json_of(draw, good[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + good[8 + length :]


Damage = Callable[[st.DrawFn, bytes], bytes]


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A file, what damages it besides bytes, and the commands that read it: words, with `{}` for the folder of all files."""

    path: str
    damage: Damage
    commands: tuple[str, ...]
    sealed: bool = False  # the manifest lists it as it is


REPORT, EXPORT = "report {}/run", "export {}/run --out={}/out/w.safetensors --format=safetensors"
GENERATE = "generate {}/run --max-new-tokens=1"
EXPORT_SAVED, GENERATE_SAVED = EXPORT.replace("/run", "/saved"), GENERATE.replace("/run", "/saved")
RESUME = f"rank {TRAINED} steps=3 run_dir={{}}/out/resumed resume={{}}/saved"
KEYS = "data.tokenizer={}/text/tokenizer data.cache_dir={}/out/cache"
TOKENIZE = f"tokenize {{}}/text/a.jsonl {KEYS}"
TRAIN = (
    f"train experiment=smoke data=jsonl data.path={{}}/text/a.jsonl {KEYS} data.sequence_length=512 data.on_error=skip"
)
KINDS = {
    "config.yaml": Kind("run/config.yaml", bytes_of, (REPORT, EXPORT, GENERATE)),
    "report.json": Kind("run/report.json", json_of, (REPORT, "report {}/run {}/saved --out={}/out/plot.html")),
    "metrics.jsonl": Kind("run/metrics.jsonl", lines_of, ("report {}/run --out={}/out/plot.svg",)),
    "plan.json": Kind("run/plan.json", json_of, (REPORT, GENERATE)),
    "profile.json": Kind("run/profile.json", json_of, ("show plan.profile={}/run", REPORT)),
    "schedule.csv": Kind(
        "run/schedule.csv",
        bytes_of,
        ("show pipeline.schedule={}/run/schedule.csv pipeline.num_stages=1 pipeline.num_microbatches=4",),
    ),
    "weights": Kind("run/weights/model.safetensors", header_of, (EXPORT, GENERATE)),
    "manifest.json": Kind(f"saved/{SNAPSHOT}/{NAME}", json_of, (EXPORT_SAVED, GENERATE_SAVED), sealed=True),
    "state.json": Kind(f"saved/{SNAPSHOT}/state.json", json_of, (EXPORT_SAVED, RESUME), sealed=True),
    "optimizer": Kind(f"saved/{SNAPSHOT}/optimizer/rank-0000.safetensors", header_of, (RESUME,), sealed=True),
    "jsonl": Kind("text/a.jsonl", lines_of, (TOKENIZE, TRAIN)),
    "tokenizer.json": Kind("text/tokenizer/tokenizer.json", json_of, (TOKENIZE,)),
    "tokenizer_config.json": Kind("text/tokenizer/tokenizer_config.json", json_of, (TOKENIZE,)),
    "template": Kind("text/tokenizer/chat_template.jinja", bytes_of, (TOKENIZE, TRAIN)),
    "tokens.json": Kind(
        "tokens/tokens.json",
        json_of,
        ("tokenize {}/tokens --check", "train experiment=smoke data=memmap data.path={}/tokens"),
    ),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its weights, one that was stopped, texts with a tokenizer, and a folder of tokens."""
    folder = tmp_path_factory.mktemp("random")
    work = folder / "work"
    for name in ("work/out", "home", "tmp", "here"):
        (folder / name).mkdir(parents=True)
    make_text(work / "corpus")
    assert answer(in_words(f"rank {TRAINED} run_dir={{}}/run", work)) == 0
    shutil.copytree(work / "run", work / "saved")
    shutil.rmtree(work / "saved/weights")
    (work / "saved/weights").mkdir()
    save_tokenizer(work / "text/tokenizer")
    (work / "text/a.jsonl").write_text("".join(json.dumps({**CHAT, "n": n}) + "\n" for n in range(20)))
    assert answer(in_words("tokenize {}/text/a.jsonl data.tokenizer={}/text/tokenizer --out={}/tokens", work)) == 0
    return work


def in_words(command: str, work: Path) -> list[str]:
    return command.replace("{}", str(work)).split()


@pytest.fixture
def elsewhere(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """What lies outside of the files that commands are given, and may not change."""
    folder = work.parent
    monkeypatch.chdir(folder / "here")
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "out/xdg"))
    monkeypatch.setenv("MPLCONFIGDIR", str(work / "out/matplotlib"))  # it keeps a list of fonts
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setattr(train_command, "launch", lambda *_, **__: Outcome(0, 0))

    def look() -> list[Any]:
        found = (path for path in folder.rglob("*") if not path.is_relative_to(work))
        return sorted((str(path), path.stat().st_size) for path in found)

    return look


def seal(snapshot: Path, *, but: Path) -> None:
    """Makes the manifest hold again; where it is damaged itself, its own checksum alone."""
    path = snapshot / NAME
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        return
    document.pop("sha256", None)
    if but != path:
        for file in document["files"]:
            data = (snapshot / file["path"]).read_bytes()
            file |= {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with contextlib.suppress(ValueError):  # it has what canonical JSON has not
        digest = hashlib.sha256(canonical_json(document)).hexdigest()
        path.write_bytes(canonical_json({**document, "sha256": digest}))


def answer(words: list[str]) -> int:
    """The exit code, within the time that is given. `rank` is what `train` starts, here alone."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer after {SECONDS:.0f} s")

    before, mask = signal.signal(signal.SIGALRM, late), os.umask(0o022)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return rank(words[1:]) if words[0] == "rank" else int(main(words))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.umask(mask)


@contextlib.contextmanager
def damaged(work: Path, kind: Kind, draw: st.DrawFn) -> Iterator[None]:
    """The file is another one in the block."""
    path = work / kind.path
    snapshot = work / "saved" / SNAPSHOT
    good, manifest = path.read_bytes(), (snapshot / NAME).read_bytes()
    path.write_bytes((bytes_of if draw(st.integers(0, 2)) == 0 else kind.damage)(draw, good))
    if kind.sealed:
        with contextlib.suppress(ValueError, RecursionError):
            seal(snapshot, but=path)
    try:
        yield
    finally:
        path.write_bytes(good)
        (snapshot / NAME).write_bytes(manifest)
        remove_written(work)


def remove_written(work: Path) -> None:
    shutil.rmtree(work / "out")
    (work / "out").mkdir()


def check_answer(command: str, work: Path, codes: tuple[int, ...] = (0, 1, 2)) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = answer(in_words(command, work))
    told, lines = out.getvalue() + err.getvalue(), err.getvalue().splitlines()
    assert code in codes, (command, code, told)
    assert "Traceback" not in told, (command, told)
    assert "please report" not in told, (command, told)
    assert not set(told) & {"\x1b", "\x07", "\x00", "\u202e"}, (command, told)
    assert code == 0 or (lines and lines[-1].startswith("pipetrain: ")), (command, lines)


def test_good_files_are_taken(work: Path, elsewhere: Callable[[], list[Any]]) -> None:
    """So that what is refused in the other tests is refused for its damage."""
    before = elsewhere()
    for command in dict.fromkeys(command for kind in KINDS.values() for command in kind.commands):
        check_answer(command, work, (0,))
        remove_written(work)
    assert elsewhere() == before


# Two thousand take up to an hour per kind: PIPETRAIN_RANDOM_FILES=2000 python -m pytest -m slow tests/security/test_random_files.py
MANY = int(os.environ.get("PIPETRAIN_RANDOM_FILES", "30"))


@pytest.mark.parametrize("num_files", [4, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize("name", KINDS)
def test_some_random_files(name: str, num_files: int, work: Path, elsewhere: Callable[[], list[Any]]) -> None:
    """The same ones each time; to make a failing file smaller takes minutes."""
    some = settings(
        max_examples=num_files,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def check(data: st.DataObject) -> None:
        before = elsewhere()
        with damaged(work, KINDS[name], data.draw):
            for command in KINDS[name].commands:
                check_answer(command, work)
        assert elsewhere() == before

    some(given(data=st.data())(check))()
