"""Which tokens of a chat count: tables made by hand, for templates with marks and without, with a date, and that drop reasoning."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
import torch
from tiny_tokenizer import DATED, DROPS, MARKED, PLAIN, save_tokenizer

from pipetrain.config.records import DataConfig
from pipetrain.data.dataset import make_data, make_tokenizer
from pipetrain.data.documents import Document
from pipetrain.data.tokenizer import HfTokenizer

MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Paris", "reasoning_content": "hm"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It is", "reasoning_content": "so", "tool_calls": None},
]
# What is in brackets counts.
FIRST, SECOND = "<s><|user|>Hi\n<|assistant|>", "<|user|>Why?\n<|assistant|>"
TABLE = {
    "marks": (MARKED, "answers", f"{FIRST}[Paris</s>]\n{SECOND}[It is</s>]\n"),
    "marks, last": (MARKED, "last", f"{FIRST}Paris</s>\n{SECOND}[It is</s>]\n"),
    "all": (MARKED, "all", f"[{FIRST}Paris</s>\n{SECOND}It is</s>\n]"),
    "turn by turn": (PLAIN, "answers", f"{FIRST}[Paris</s>\n]{SECOND}[It is</s>\n]"),
    "last turn": (PLAIN, "last", f"{FIRST}Paris</s>\n{SECOND}[It is</s>\n]"),
    "a date": (DATED, "answers", f"<|system|>31 May 2024\n{FIRST}[Paris</s>\n]{SECOND}[It is</s>\n]"),
    "reasoning dropped, last": (DROPS, "last", f"{FIRST}Paris</s>\n{SECOND}[(so)It is</s>\n]"),
}


def tokenizer_of(folder: pathlib.Path, template: str | None, counted: str = "answers") -> HfTokenizer:
    config = DataConfig(
        tokenizer=str(save_tokenizer(folder, template)),
        assistant_only_loss={"answers": True, "all": False}.get(counted, counted),
        template_date="2024-05-31",
    )
    made = make_tokenizer(config)
    assert isinstance(made, HfTokenizer)
    return made


def config_of(folder: pathlib.Path, rows: list[Any], **more: Any) -> DataConfig:
    """Of a file of these rows, a sample each."""
    save_tokenizer(folder / "tokenizer", MARKED)
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"path": "chat.jsonl", "tokenizer": "tokenizer", "cache_dir": "cache"}
    where = {key: str(folder / file) for key, file in files.items()}
    return DataConfig(
        **{"name": "jsonl", "layout": "padded", "global_batch_size": 1, "eval_fraction": 0.0, **where, **more}
    )


def chat(messages: Any = MESSAGES) -> Document:
    return Document({"messages": messages}, (0, 1), 1, False)


def bracketed(tokenizer: HfTokenizer, document: Document) -> str:
    """The text of a document, with brackets around the tokens that count."""
    encoded = tokenizer.encode_documents([document])
    assert encoded.problems == {}
    assert encoded.counted is not None
    text, inside = "", False
    for token, counts in zip(encoded.ids.tolist(), encoded.counted.tolist(), strict=True):
        text += ("[" if counts else "]") if counts != inside else ""
        inside = counts
        text += tokenizer._loaded.decode([token], skip_special_tokens=False)
    return text + ("]" if inside else "")


@pytest.mark.parametrize("name", TABLE)
def test_what_counts(name: str, tmp_path: pathlib.Path) -> None:
    template, counted, expected = TABLE[name]
    assert bracketed(tokenizer_of(tmp_path, template, counted), chat()) == expected


def test_reasoning_that_is_dropped_is_refused_by_the_template_s_name(tmp_path: pathlib.Path) -> None:
    """A prompt is another one then, in training and in use. Where nothing is dropped the same template is taken: sample by sample."""
    tokenizer = tokenizer_of(tmp_path / "dropping", DROPS)
    with pytest.raises(
        ValueError, match=r"chat template of .*dropping .* reasoning is dropped; use data\.assistant_only_loss=last"
    ):
        tokenizer.encode_documents([chat()])
    without = [{"role": it["role"], "content": it["content"]} for it in MESSAGES]
    assert bracketed(tokenizer, chat(without)) == f"{FIRST}[Paris</s>\n]{SECOND}[It is</s>\n]"


def test_a_token_of_prompt_and_answer_is_refused(tmp_path: pathlib.Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(tmp_path, template)
    fox = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "fox"}]
    assert "Ġfox" in tokenizer._loaded.get_vocab()
    with pytest.raises(ValueError, match="a token reaches from a prompt into its answer"):
        tokenizer.encode_documents([chat(fox)])


def test_marks_count_what_transformers_counts(tmp_path: pathlib.Path) -> None:
    tokenizer = tokenizer_of(tmp_path, MARKED)
    encoded = tokenizer.encode_documents([chat()])
    theirs = tokenizer._loaded.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.ids.tolist() == theirs["input_ids"]
    assert encoded.counted is not None
    assert encoded.counted.astype(int).tolist() == theirs["assistant_masks"]


def test_a_chat_begins_once(tmp_path: pathlib.Path) -> None:
    """The template writes <s>, and the tokenizer would put another before it."""
    tokenizer = tokenizer_of(tmp_path, PLAIN)
    assert tokenizer.encode_documents([chat()]).ids.tolist().count(0) == 1
    assert tokenizer.encode_prompt(tokenizer.render(MESSAGES[:1])).count(0) == 1
    assert tokenizer.encode(b"Hi")[0] == 0
    text = Document("<s>Hi</s>", (0, 1), 1, False)
    assert tokenizer.encode_documents([text]).ids.tolist() == [0, *tokenizer.encode_prompt("Hi"), 1]


def test_a_chat_without_an_answer_is_told(tmp_path: pathlib.Path) -> None:
    chats = (MESSAGES, MESSAGES[:1], MESSAGES, [{"role": "user"}])
    config = config_of(tmp_path, [{"messages": messages} for messages in chats], layout=None, sequence_length=64)
    with pytest.raises(ValueError, match=r"chat\.jsonl:2: it has no token that counts .*data\.on_error=skip"):
        make_data(config, 0)
    data = make_data(dataclasses.replace(config, on_error="skip"), 0)
    assert data.num_skipped == 2
    assert data.first_skipped is not None
    assert "chat.jsonl:2" in data.first_skipped
    with pytest.raises(ValueError, match=r"chat\.jsonl:2: it has no token that counts"):
        make_data(config, 0)  # of the cache, where it is left out


def test_targets_are_masked_by_length_and_not_by_token(tmp_path: pathlib.Path) -> None:
    """The token that fills up is the one that ends an answer, and answers learn to end."""
    data = make_data(config_of(tmp_path, [{"messages": MESSAGES}], sequence_length=32), 0)
    assert data.tokenizer is not None
    assert data.tokenizer.pad_token == 1
    inputs, targets = data.train.batch(0)
    assert inputs["input_ids"][0, 21:].tolist() == [1] * 11
    assert inputs["attention_mask"][0].tolist() == [1] * 21 + [0] * 11
    assert (targets == 1).sum() == 2
    assert torch.equal(targets >= 0, torch.tensor([[5 <= at <= 7 or 15 <= at <= 18 for at in range(32)]]))


def test_a_chat_that_is_too_long_is_cut_where_that_is_wanted(tmp_path: pathlib.Path) -> None:
    config = config_of(tmp_path, [{"messages": MESSAGES}], sequence_length=8)
    with pytest.raises(
        ValueError, match=r"it has 21 tokens, more than .*=8; .*=21 takes all, data\.truncate=true cuts it"
    ):
        make_data(config, 0)
    inputs, targets = make_data(dataclasses.replace(config, truncate=True), 0).train.batch(0)
    whole, of_whole = make_data(dataclasses.replace(config, sequence_length=21), 0).train.batch(0)
    assert torch.equal(inputs["input_ids"], whole["input_ids"][:, :8])
    assert inputs["attention_mask"].tolist() == [[1] * 8]
    assert torch.equal(targets[:, :7], of_whole[:, :7])
    assert (targets >= 0).sum() == 2  # the last of the eight tokens predicts nothing
    packed = make_data(dataclasses.replace(config, truncate=True, layout="packed"), 0)
    assert torch.equal(packed.train.batch(0).targets, targets)
    with pytest.raises(ValueError, match=r"it has 21 tokens, and none of the first data\.sequence_length=4 counts"):
        make_data(dataclasses.replace(config, truncate=True, sequence_length=4), 0)


def test_rows_of_sharegpt_are_chats(tmp_path: pathlib.Path) -> None:
    turns = [("human", "Hi"), ("gpt", "Paris"), ("human", "Why?"), ("gpt", "It is")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "id": 3}
    ours, theirs = (
        make_data(config_of(tmp_path / name, [one], sequence_length=32), 0).train.batch(0)
        for name, one in (("ours", {"messages": MESSAGES}), ("theirs", row))
    )
    assert torch.equal(ours.targets, theirs.targets)
    assert torch.equal(ours.inputs["input_ids"], theirs.inputs["input_ids"])
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: message 1 of `conversations` is no object with the texts"):
        make_data(config_of(tmp_path, [{"conversations": [row["conversations"][0], {"from": "gpt"}]}]), 0)


def test_a_chat_that_begins_with_an_answer_is_one_bad_document(tmp_path: pathlib.Path) -> None:
    """Not a template that cannot tell what an answer is: the others are samples."""
    tokenizer = tokenizer_of(tmp_path, "{{ messages[0].role and '' }}" + PLAIN)
    encoded = tokenizer.encode_documents([chat(MESSAGES[1:]), chat()])
    assert encoded.problems == {0: "it begins with an answer, and the chat template writes no prompt before it"}


PARTS = [{"type": "text", "text": "Hi"}]
TAKES_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("template", [MARKED, PLAIN, TAKES_PARTS])
def test_content_in_parts_is_text_or_refused(template: str, tmp_path: pathlib.Path) -> None:
    """A template made for texts alone would write a list as Python does, and a model would learn to answer so."""
    tokenizer = tokenizer_of(tmp_path, template, "all")
    document = chat([{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}])
    if template is TAKES_PARTS:
        assert bracketed(tokenizer, document) == "[<|user|>Hi</s><|assistant|>Hi</s>]"
        return
    (problem,) = tokenizer.encode_documents([document]).problems.values()
    # the first message's text is added to a line end, which jinja refuses by itself
    assert re.search("does not take it|has a list as its content", problem)
    answer = chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PARTS}])
    (problem,) = tokenizer.encode_documents([answer]).problems.values()
    assert re.search(
        "message 1 has a list as its content, which the chat template of .* writes as Python does", problem
    )


def test_half_a_character_is_told(tmp_path: pathlib.Path) -> None:
    """What a JSON string may hold, and no tokenizer takes."""
    tokenizer = tokenizer_of(tmp_path, MARKED)
    broken = json.loads(r'"a\ud800b"')
    for document in (Document(broken, (0, 1), 1, False), chat([{"role": "assistant", "content": broken}])):
        encoded = tokenizer.encode_documents([document])
        assert encoded.problems == {0: r"it has half a character (\ud800, a surrogate alone), which is no text"}


def test_a_tokenizer_without_a_template_takes_no_chats(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="it has no chat template, which chats are written with"):
        tokenizer_of(tmp_path, None).encode_documents([chat()])
