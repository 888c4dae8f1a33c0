"""Methods by name, alone, with other options, together and on other shapes: what the contract is run over."""

from collections.abc import Iterable

from crosslayer.core.methods import method_class, method_names, to_entry
from tests.helpers.daily import daily

BLOCKS = ((2, 3), (4, 5))
SINGLE = {name: [to_entry(method_class(name).example(6))] for name in method_names()}
VARIANTS = {
    "llama": [],
    "uniattn, two blocks": [{"name": "uniattn", "superblocks": BLOCKS}],
    "drop of all kinds": [{"name": "drop", "attention": (0, 3), "mlp": (2,), "layers": (4,)}],
    "resformer identity": [{"name": "resformer", "mode": "identity"}],
    "resformer sparse": [{"name": "resformer", "mode": "sparse"}],
    "resformer dense": [{"name": "resformer", "mode": "dense", "source": "all"}],
    "resformer all": [{"name": "resformer", "mode": "constant", "source": "all"}],
    "resformer previous queries": [{"name": "resformer", "of": "queries", "source": "previous"}],
    "resformer keys": [{"name": "resformer", "of": "keys"}],
    "resformer weights": [{"name": "resformer", "mode": "constant", "weights": (0.5, 1.0, 2.0, 3.0, 0.0)}],
    "svformer anchors": [{"name": "svformer", "anchors": (0, 3)}],
    "svformer keys": [{"name": "svformer", "share": "keys"}],
    "svformer all, every two": [{"name": "svformer", "share": ("queries", "keys", "values"), "every": 2}],
    "cla of 4 in the top": [{"name": "cla", "group": 4, "start": 1, "end": 6}],
    "uniattn heads": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "heads"}],
    "uniattn heads-from-values": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "heads-from-values"}],
    "uniattn mlp": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": "mlp"}],
    "uniattn none": [{"name": "uniattn", "superblocks": BLOCKS, "compensation": None}],
    "cla groups, compensated": [{"name": "cla", "groups": ((1, 2, 3), (4, 5)), "compensation": "attention"}],
    "drop compensated": [{"name": "drop", "attention": (0, 3), "compensation": "attention"}],
    "attnres blocks": [{"name": "attnres", "block": 5}],
    "mudd residual": [{"name": "mudd", "ways": "residual"}],
    "hyper_connections of two streams": [{"name": "hyper_connections", "streams": 2, "iterations": 3}],
    "fusedkv lite": [{"name": "fusedkv", "lite": True}],
    "cross_attention previous": [{"name": "cross_attention", "source": "previous"}],
    "denseformer, dilated": [{"name": "denseformer", "dilation": 2, "period": 2}],
    "denseformer, sparse": [{"name": "denseformer", "dilation": 4, "period": 5}],
    "yoco, a short window": [{"name": "yoco", "window": 5}],
    "cla, a source of three": [{"name": "cla", "groups": ((0, 4), (1, 2, 3, 5))}],
    "cla heads": [{"name": "cla", "groups": ((0, 4), (1, 5)), "compensation": "heads"}],
    "shared_choice, own choice": [
        {
            "name": "shared_choice",
            "groups": ((0, 2, 5), (1, 3)),
            "tokens": 4,
            "sinks": 1,
            "window": 2,
            "sparse_choosers": (0,),
        }
    ],
    "shared_choice, other heads": [
        {
            "name": "shared_choice",
            "groups": ((1, 2, 5),),
            "tokens": 0.3,
            "least": 0,
            "sinks": 0,
            "window": 1,
            "chooser_heads": ((), (), (1, 0), (), (), (1, 1)),
        }
    ],
}
COMPOSITIONS = {
    "attnres + svformer": ["attnres", "svformer"],
    "attnres + resformer": ["attnres", "resformer"],
    "resformer + cla": ["resformer", "cla"],
    "uniattn + drop of readers": [{"name": "uniattn", "superblocks": BLOCKS}, {"name": "drop", "attention": (3,)}],
    "cla + drop of a reader": [{"name": "cla", "groups": ((1, 4), (2, 5))}, {"name": "drop", "attention": (4,)}],
    "uniattn + resformer": [{"name": "uniattn", "superblocks": BLOCKS}, "resformer"],
    "attnres + drop compensated": ["attnres", {"name": "drop", "attention": (2,), "compensation": "attention"}],
    "attnres + cla": [{"name": "attnres", "block": 3}, "cla"],
    "attnres + drop": ["attnres", {"name": "drop", "attention": (0,), "mlp": (5,)}],
    "svformer + uniattn": ["svformer", {"name": "uniattn", "superblocks": BLOCKS}],
    "hyper_connections + cla": ["hyper_connections", "cla"],
    "hyper_connections + drop": ["hyper_connections", {"name": "drop", "attention": (0,), "mlp": (5,), "layers": (2,)}],
    "mudd + uniattn": ["mudd", {"name": "uniattn", "superblocks": BLOCKS}],
    "mudd + drop": ["mudd", {"name": "drop", "attention": (0,), "mlp": (5,), "layers": (2,)}],
    "resformer + uniattn + attnres": ["resformer", {"name": "uniattn", "superblocks": BLOCKS}, "attnres"],
    "resformer + neutreno": ["resformer", {"name": "neutreno", "weight": 0.2}],
    "neutreno + resformer": ["neutreno", "resformer"],
    "identity_mapping + cla": ["identity_mapping", "cla"],
    "denseformer + drop": ["denseformer", {"name": "drop", "attention": (0,), "mlp": (5,), "layers": (3,)}],
    "fusedkv + resformer": ["fusedkv", "resformer"],
    "cross_attention + resformer": ["cross_attention", "resformer"],
    "shared_choice + cla": [
        "cla",
        {"name": "shared_choice", "groups": ((1, 2, 3), (4, 5)), "tokens": 4, "sinks": 1, "window": 2},
    ],
    "resformer + yoco + attnres": ["resformer", {"name": "yoco", "window": 5}, "attnres"],
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA2 = {
    "family": "gemma2", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 6, "final_logit_softcapping": 9.0,
    "tie_word_embeddings": True, **ALTERNATING,
}  # fmt: skip
CAPPED = {**GEMMA2, "attn_logit_softcapping": 3.0}
GEMMA3 = {
    "family": "gemma3", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 6, "qk_norm": True,
    "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    },
}  # fmt: skip
GPT2 = {"family": "gpt2", "hidden_act": "gelu_new", "attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}  # others lack float64
LINEAR = {
    "linear_num_heads": 2, "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] + ["full_attention"] * 3,
}  # fmt: skip
APART = [{"name": "uniattn", "superblocks": ((1, 3), (2, 4))}]  # groups within a mask
SHAPES = {
    "gemma2": ([], CAPPED),
    "cla, gemma2": ([{"name": "cla", "groups": ((0, 2, 4), (1, 3, 5)), "compensation": "mlp"}], CAPPED),
    "uniattn + resformer, gemma2": ([*APART, "resformer"], GEMMA2),
    "attnres + drop compensated, gemma2": (COMPOSITIONS["attnres + drop compensated"], GEMMA2),
    "cla, gemma3": (["cla"], GEMMA3),
    "resformer + attnres, gemma3": (["resformer", "attnres"], GEMMA3),
    "linear attention": ([], LINEAR),
    "cla + resformer, linear attention": ([{"name": "cla", "groups": ((1, 3),)}, "resformer"], LINEAR),
    "attnres, linear attention": (["attnres"], LINEAR),
    "gpt2": ([], GPT2),
    "resformer + cla, gpt2": (["resformer", "cla"], GPT2),
    "attnres, gpt2": (["attnres"], GPT2),
    "mixture of experts": ([], EXPERTS),
    "resformer + cla, mixture of experts": (["resformer", "cla"], EXPERTS),
    "attnres, mixture of experts": (["attnres"], {**EXPERTS, "output_router_logits": True}),
    "cla, sliding windows": (["cla"], SLIDING),
    "uniattn, sliding windows": ([{"name": "uniattn", "superblocks": BLOCKS}], SLIDING),
    "svformer, MQA, qk-norm": (["svformer"], {"num_key_value_heads": 1, "qk_norm": True}),
    "resformer, biases, tied": (["resformer"], {"attention_bias": True, "tie_word_embeddings": True}),
    "cross_attention, sliding windows": (["cross_attention"], {"sliding_window": 5}),
    "cla, qk-norm, biases": (["cla"], {"num_key_value_heads": 4, "qk_norm": True, "attention_bias": True}),
    "fusedkv, MQA": (["fusedkv"], {"num_key_value_heads": 1}),
}
CASES = {
    **{name: (methods, {}) for group in (SINGLE, VARIANTS, COMPOSITIONS) for name, methods in group.items()},
    **SHAPES,
}
DAILY = {  # what `make test` runs beside every method alone; `make test-slow` runs all
    "llama", "uniattn mlp", "drop compensated", "attnres blocks", "resformer + uniattn + attnres",
    "resformer + yoco + attnres", "cla, gemma2", "cla, gemma3", "attnres, linear attention",
    "resformer + cla, gpt2", "attnres, mixture of experts", "uniattn, sliding windows", "svformer, MQA, qk-norm",
}  # fmt: skip


def each(cases: Iterable[str]) -> list:
    """The parameters of a test over cases, those that are not run daily marked as slow."""
    return daily(cases, *SINGLE, *DAILY)
