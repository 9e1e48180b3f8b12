"""A tokenizer made here, of bytes and a few hundred merges, and chat templates as they are met: for tests alone."""

from __future__ import annotations

import functools
import json
import pathlib

TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris. "
    "Hello there, how are you today? I am fine, thank you. system user assistant\n"
) * 4

# With {% generation %} marks around what the model writes.
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}<|{{ m.role }}|>{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The same text without marks.
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Reasoning of all turns but the last is left out.
DROPS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if loop.last and m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{{ eos_token + '\n' }}"
    "{% else %}<|{{ m.role }}|>{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Begins with today's date.
DATED = "<|system|>{{ strftime_now('%d %B %Y') }}\n" + PLAIN


@functools.cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(tokenizer.to_str())


def save_tokenizer(folder: pathlib.Path, template: str | None = MARKED, **changes: object) -> pathlib.Path:
    """A folder as `save_pretrained` of a tokenizer makes it; `changes` are of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained())
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
