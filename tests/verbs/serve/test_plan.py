"""What `plan --engine vllm` says of six unlike models is what vLLM itself allocates for a request.

It needs an environment of its own, which `make test-serving` makes.
"""

import importlib.util
import json

import pytest
from transformers import AutoConfig

import crosslayer
from crosslayer.testing.tiny import build, config_of
from crosslayer.wiring import engines
from tests.verbs.serve.test_vllm import SHAPE, by_vllm, job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make test-serving"),
]
LENGTH, MEMORY, BLOCK, BATCHED = 4096, 2**28, 32, 512
BASE = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 64, "max_position_embeddings": LENGTH, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
FULL, WINDOW = "full_attention", "sliding_attention"
MODELS: dict[str, dict] = {
    "llama": {"num_hidden_layers": 5},
    "mistral": {"num_hidden_layers": 3, "sliding_window": 100},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 96, "layer_types": [WINDOW, FULL] * 2},
    "gemma3_text": {
        "num_hidden_layers": 8, "sliding_window": 64, "layer_types": [*[WINDOW] * 5, FULL, *[WINDOW] * 2],
        "query_pre_attn_scalar": 32,
    },
    # vLLM's Cohere 2 attends to one token more than its config says; here that needs no further block
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 34, "layer_types": [WINDOW, WINDOW, FULL, WINDOW, FULL]},
}  # fmt: skip


def test_bytes_of_a_request(tmp_path, monkeypatch):
    for model_type, fields in MODELS.items():
        config = AutoConfig.for_model(model_type, **BASE, **fields)
        names = {"gemma3_text": "Gemma3ForCausalLM"}
        config.architectures = [names.get(model_type, f"{model_type.capitalize()}ForCausalLM")]
        config.save_pretrained(tmp_path / model_type)
    build(config_of(["cla"], **SHAPE | {"max_position_embeddings": LENGTH})).float().save_pretrained(tmp_path / "cla")
    folders = [tmp_path / name for name in (*MODELS, "cla")]
    options = {
        "load_format": "dummy", "max_model_len": LENGTH, "kv_cache_memory_bytes": MEMORY, "block_size": BLOCK,
        "max_num_batched_tokens": BATCHED,
    }  # fmt: skip
    answers, _ = by_vllm([job(folder, prompts=[[3, 5]], new=1, **options) for folder in folders])
    monkeypatch.setattr(engines, "BLOCK", BLOCK)
    monkeypatch.setattr(engines, "IN_FLIGHT", answers[0]["in_flight"])
    sizes = {}
    for folder, answer in zip(folders, answers, strict=True):
        planned = crosslayer.plan(folder, length=LENGTH, dtype="float32", engine="vllm").stored_bytes
        held = crosslayer.plan(folder, length=LENGTH, dtype="float32").stored_bytes
        sizes[folder.name] = {"planned": planned, "vllm": MEMORY / answer["requests"], "held": held}
    print(json.dumps(sizes))
    for name, size in sizes.items():
        # vLLM rounds the number of its blocks down to what the memory holds
        assert size["planned"] == pytest.approx(size["vllm"], rel=0.01), (name, sizes)
