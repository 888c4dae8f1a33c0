# %% [markdown]
# # Write a method of this week's paper
#
# A paper says: let the layers in the middle share the keys and values of one layer ("sandwich-bottom", arXiv 2410.14442).
# That is a file of its own, [sandwich.py](sandwich.py), beside this notebook: one dataclass, which answers who owns and
# who reads.

# %%
from pathlib import Path

import sandwich

print(Path(sandwich.__file__).read_text())

# %% [markdown]
# An instance stands in a config like any method, and the model is built, trained, cached and saved like any model.

# %%
from crosslayer import CrossLayerConfig

config = CrossLayerConfig(num_hidden_layers=8, cross_layer=[sandwich.Sandwich(below=3, above=2)])
print(config.plan.diagram())

# %% [markdown]
# Is it right? The contract that the package's own methods pass runs over it: cached = uncached = chunked, left padding,
# every way to generate, gradients under checkpointing, save and load, causality.

# %%
from crosslayer.testing import check_method

check_method(sandwich.Sandwich.example(6))
print("all checks passed")

# %% [markdown]
# What would it cost a pretrained model, before any training? A what-if runs the unmodified SmolLM2 as if it were wired
# so.

# %%
import torch

import crosslayer

model, tokenizer = crosslayer.load_model("smollm2")
text = "The first token of a text receives a large share of all attention, whatever it says. " * 4
ids = tokenizer(text, return_tensors="pt").input_ids
with torch.no_grad():
    print(f"as it is: {model(ids, labels=ids).loss:.3f} nats a token")
    for below, above in ((26, 2), (24, 2), (20, 2)):
        method = sandwich.Sandwich(below, above)
        share = method.plan(30).cached_fraction()
        with crosslayer.what_if(model, method):
            print(f"below {below}, above {above}: {model(ids, labels=ids).loss:.3f}, with {share:.0%} of the cache")

# %% [markdown]
# From here on `crosslayer.retrofit("smollm2", method={"name": "sandwich", "below": 24, "above": 2, "compensation":
# "attention"})` fits W_c and gives a report, and `crosslayer compare --methods 'vanilla, sandwich' --allow-methods
# sandwich` trains it against others (its folder in `PYTHONPATH`). All that a method may answer: [A method of your own](../YOUR_METHOD.md).
