"""A causal language model of Hugging Face learns chats: `torchrun --nproc-per-node=2 examples/finetune.py MODEL CHATS runs/taught`.

`python docs/small_llama.py MODEL CHATS` makes both. Type it again after a kill: it continues. To get files for `from_pretrained`, use
`pipetrain train experiment=finetune` and `pipetrain export`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipetrain

BATCH = 16


def train(model: str, chats: str, folder: str, num_steps: int) -> list[float]:
    """The loss of each step that ran."""
    losses, tokenizer = [], AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in Path(chats).read_text().splitlines()]
    texts = tokenizer.apply_chat_template(rows, tokenize=False)
    with pipetrain.Pipeline(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        pipetrain.load(folder, pipeline, optimizer)
        while pipeline.step_index < num_steps:
            losses.append(float(pipeline.step(make_batch(tokenizer, texts, pipeline.step_index))))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.step_index % 4 == 0:
                pipetrain.save(folder, pipeline, optimizer, keep_last=2)
            if pipeline.rank == 0:
                print(f"step {pipeline.step_index}  loss {losses[-1]:.3f}")
    return losses


def make_batch(tokenizer, texts: list[str], step: int) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels, [16, longest]; padding does not count."""
    own = [texts[(step * BATCH + number) % len(texts)] for number in range(BATCH)]
    batch = tokenizer(own, padding=True, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


if __name__ == "__main__":
    train(*sys.argv[1:4], num_steps=100)
