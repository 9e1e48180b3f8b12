"""A small Llama with a tokenizer, and chats to teach it, made on this machine: `python docs/small_llama.py small-llama chats.jsonl`.

The chats ask what functions of Python's standard library do, and answer with the first sentence of their docstrings. The tokenizer is trained
on them; the model's weights are random.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator

_SPECIAL = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCABULARY = 2048


def answers() -> Iterator[tuple[str, str]]:
    """What each documented function of the standard library is called, and the first sentence about it; in a fixed order."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.glob("*.py")):
        tree = ast.parse(file.read_bytes())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                sentence = re.split(r"\.\s|\n\s*\n", ast.get_docstring(node) or "")[0]
                if 20 <= len(sentence) <= 200:
                    yield f"{file.stem}.{node.name}", " ".join(sentence.split()).rstrip(".") + "."


def save_chats(path: pathlib.Path, num_chats: int) -> list[str]:
    """A chat a line; returns all text in them."""
    texts = []
    with path.open("w") as file:
        for name, answer in list(answers())[:num_chats]:
            question = f"What is {name} for?"
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
            texts += [question, answer]
    return texts


def save_tokenizer(folder: pathlib.Path, texts: list[str]) -> int:
    """A byte-level BPE of these texts with a chat template; returns how many tokens it knows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_model(folder: pathlib.Path, vocabulary_size: int, num_layers: int, width: int) -> None:
    """A Llama with random weights in bfloat16, as `from_pretrained` loads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(folder: str, chats: str, num_chats: int = 500, num_layers: int = 4, width: int = 128) -> None:
    """The folder of the model with its tokenizer, and the file of the chats."""
    place = pathlib.Path(folder)
    texts = save_chats(pathlib.Path(chats), num_chats)
    vocabulary_size = save_tokenizer(place, texts)
    save_model(place, vocabulary_size, num_layers, width)
    print(f"{place}: a Llama of {num_layers} layers and {vocabulary_size} tokens; {chats}: {len(texts) // 2} chats")


if __name__ == "__main__":
    main(*sys.argv[1:3])
