"""Runs in an environment of its own, since kvpress needs an older transformers: which tokens does it keep?

    python by_kvpress.py MODEL_FOLDER IDS.json KEPT.json

IDS.json holds lists of ids; KEPT.json gets, by text, the sorted positions of each layer and head.
"""

import json
import sys

import torch
from kvpress import StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

SHARE = 0.5  # of the tokens is evicted


def kept(model, press, ids):
    """Return the positions that a press keeps of a prompt, by layer and head."""
    positions, score = [], press.score

    def spy(*arguments, **options):
        scores = score(*arguments, **options)
        kept = scores.topk(int(len(ids) * (1 - SHARE)), dim=-1).indices[0]
        positions.append([sorted(head) for head in kept.tolist()])
        return scores

    press.score = spy
    with torch.no_grad(), press(model):
        model(torch.tensor([ids]), past_key_values=DynamicCache())
    return positions


def main():
    folder, source, target = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open(source, encoding="utf-8") as file:
        texts = json.load(file)
    answer = [kept(model, StreamingLLMPress(SHARE), ids) for ids in texts]
    with open(target, "w", encoding="utf-8") as file:
        json.dump(answer, file)


main()
