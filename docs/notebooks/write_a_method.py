# %% [markdown]
# # Write a method from this week's paper
#
# A paper proposes that the middle layers share the keys and values of one layer ("sandwich-bottom", arXiv 2410.14442).
# The method takes one file, [sandwich.py](sandwich.py): a dataclass that assigns a source to each state of each layer.

# %%
from pathlib import Path

import sandwich

print(Path(sandwich.__file__).read_text())

# %% [markdown]
# Pass an instance to a config. The model can then be built, trained, cached and saved like any other.

# %%
from crosslayer import CrossLayerConfig

config = CrossLayerConfig(num_hidden_layers=8, cross_layer=[sandwich.Sandwich(below=3, above=2)])
print(config.plan.diagram())

# %% [markdown]
# Is it correct? Run the contract tests, which the package's own methods also pass. They check that cached, uncached and
# chunked runs agree, and test left padding, every generation mode, gradients with checkpointing, save and load, and
# causality.

# %%
from crosslayer.testing import check_method

check_method(sandwich.Sandwich.example(6))
print("all checks passed")

# %% [markdown]
# How much would it damage a pretrained model, before any training? A what-if runs the unmodified SmolLM2 with this
# plan:

# %%
import torch

import crosslayer

model, tokenizer = crosslayer.load_model("smollm2")
text = "The first token of a text receives a large share of all attention, whatever it says. " * 4
ids = tokenizer(text, return_tensors="pt").input_ids
with torch.no_grad():
    print(f"as it is: {model(ids, labels=ids).loss:.3f} nats per token")
    for below, above in ((26, 2), (24, 2), (20, 2)):
        method = sandwich.Sandwich(below, above)
        share = method.plan(30).cached_fraction()
        with crosslayer.what_if(model, method):
            print(f"below {below}, above {above}: {model(ids, labels=ids).loss:.3f}, with {share:.0%} of the cache")

# %% [markdown]
# Next: `crosslayer.retrofit("smollm2", method={"name": "sandwich", "below": 24, "above": 2, "compensation":
# "attention"})` fits linear compensation (W_c) and writes a report, and `crosslayer compare --recipe smoke --methods
# 'vanilla, sandwich' --allow-methods sandwich --out compared` trains it and compares it with the plain model (the
# folder of `sandwich.py` must be in `PYTHONPATH`). [Your own method](../methods/your_own.md) lists everything that a
# method can define.
