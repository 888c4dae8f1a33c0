"""Save a Llama with random weights and SmolLM2's tokenizer: a shape to time, whose outputs mean nothing.

    python benchmarks/gpu/random_model.py FOLDER [--dry-run]

1.2 billion parameters in bfloat16, 131,072 positions; with `--dry-run` two layers of width 64.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.models.load import load_tokenizer

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    **SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def main():
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    tokenizer = load_tokenizer("smollm2")
    torch.manual_seed(0)
    shape = TINY if options.dry_run else SHAPE
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    model.to(torch.bfloat16).save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
