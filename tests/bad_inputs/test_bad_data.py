"""Training data that is missing, unreadable or malformed gets one line that helps."""

import os

import pytest
from bad_rows import ENOUGH, Check, Row, files, text, train


def lines(content: bytes, *says: str, typed: str = "") -> Row:
    typed = f"data=jsonl data.path={{}}/a.jsonl data.cache_dir={{}}/cache {typed}".strip()
    return train(typed, *says, prepare=files(**{"a.jsonl": content}))


def second_line(line: bytes, told: str, *says: str, typed: str = "") -> Row:
    """With a good line before this one."""
    content = b'{"text": "Hello"}\n' + line + b"\n"
    return lines(content, f"{{}}/a.jsonl:2: {told}", *says, typed=typed)


DATA = [
    train("data=text", "data.path is not set", "data.path=FILE_OR_FOLDER"),
    train("data=text data.path={}/nowhere", "{}/nowhere is not there"),
    train("data=text data.path={}/textt", "did you mean data.path={}/text?", prepare=ENOUGH),
    train("data=text data.path={}/text", "matches no file", "there is no file in it", prepare=text()),
    train("data=text data.path={}/text data.pattern=*.md", "matches no file", "'**/*.txt'", prepare=ENOUGH),
    train("data=text data.path={}/text data.pattern=/etc/*", "no pattern inside a folder", prepare=ENOUGH),
    train("data=text data.path={}/text data.pattern=''", "data.pattern", prepare=ENOUGH),
    train("data=text data.path={}/text", "has 0 bytes", "give more text", prepare=text(a=b"", b=b"")),
    train("data=text data.path={}/text/a.txt", "has 20 bytes", "data.sequence_length=19", prepare=text(a=b"x" * 20)),
    train(
        "data=text data.path={}/pipe", "neither a file nor a folder", prepare=lambda folder: os.mkfifo(folder / "pipe")
    ),
    train("data=stdlib data.path={}/text", "data=text data.path={}/text", prepare=ENOUGH),
    train("data=text data.path='{}/t*/*.md'", "data.path={}/t*/*.md matches no file", prepare=ENOUGH),
    train("data=text data.path={}/text data.eval_path={}/held", "data.eval_path={}/held is not there", prepare=ENOUGH),
    train("data=text data.path={}/text data.tokenizer={}/text", "no tokenizer in this folder", prepare=ENOUGH),
    train("data=text data.path={}/text data.tokenizer=null", "data.tokenizer=byte", prepare=ENOUGH),
    lines(b"", "{}/a.jsonl: the text has 0 bytes"),
    lines(b"\n\n", "{}/a.jsonl", "has 0 tokens"),
    lines(b'{"messages": [{"role": "user", "content": "Hi"}]}', "data.tokenizer=byte", "chat template"),
    second_line(b'{"text": "ab', "it is not valid JSON", "column 10", "data.on_error=skip"),
    second_line(b'{"text": "\xff"}', "it is not UTF-8"),
    second_line(b"[]", "it is not a JSON object but a list"),
    second_line(b'{"txt": 1}', "it has neither `messages` (or `conversations`) nor `text`", "fields are: txt"),
    second_line(b'{"text": 1}', "`text` is no text but a int"),
    second_line(b'{"messages": [{"role": "user"}]}', "it has `messages`, those before", "texts or of chats"),
    second_line(
        b'{"text": "' + b"x" * 100 + b'"}',
        "it has 101 tokens",
        "data.sequence_length=101",
        typed="data.layout=padded",
    ),
    train("data=hf", "data.path is not set", "data=hf"),
    train("data=hf data.path={}/nowhere", "data.path={}/nowhere: this is no saved data set here"),
    train("data=memmap", "data.path is not set", "FILE.bin"),
    train("data=memmap data.path={}/a.bin", "{}/a.bin is no file", "pipetrain tokenize"),
    train("data=memmap data.path={}/a.bin", "has 3 bytes", "data.item_type=uint16", prepare=files(**{"a.bin": b"abc"})),
    train("data=memmap data.path={}/a.bin", "is empty", prepare=files(**{"a.bin": b""})),
    train("data=memmap data.path={}/a.bin", "has 29 tokens", prepare=files(**{"a.bin": b"a" * 64})),
    train(
        "data=memmap data.path={}/a.bin data.layout=packed", "data.layout=stream", prepare=files(**{"a.bin": b"a" * 64})
    ),
    train("data=memmap data.path={}/a.bin data.item_type=int32", "holds -1", prepare=files(**{"a.bin": b"\xff" * 400})),
    train("data=memmap data.path={}/text", "no tokens.json in this folder", prepare=ENOUGH),
    train(
        "data=memmap data.path={}/a.bin data.tokenizer=byte",
        "holds the token 24929",
        prepare=files(**{"a.bin": b"a" * 400}),
    ),
    Row("tokenize {}/text/a.txt", ("{}/text/a.txt", "--out=FOLDER"), prepare=ENOUGH),
    Row("tokenize {}/text --out={}/text", ("--out={}/text: there is something already",), prepare=ENOUGH),
    train(
        "data=text data.path={}/text",
        "a.txt may not be read",
        "chmod +r",
        prepare=lambda folder: (ENOUGH(folder), (folder / "text" / "a.txt").chmod(0)),
        as_nobody=True,
    ),
    train(
        "data=text data.path={}/text",
        "may not be read",
        "chmod +rx",
        prepare=lambda folder: (ENOUGH(folder), (folder / "text").chmod(0)),
        as_nobody=True,
    ),
]


@pytest.mark.parametrize("row", DATA, ids=lambda row: row.name)
def test_the_answer_is_one_line_that_helps(row: Row, check: Check) -> None:
    check(row)
