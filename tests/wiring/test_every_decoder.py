"""The plan agrees with the bytes that each model type's own cache allocates, or is refused with a reason."""

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import crosslayer
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.allocation import allocated, default_config, lengths_of

pytestmark = pytest.mark.skipif(CACHE != "cache", reason="default configs are those of the newest supported version")
REFUSED = {  # model type → words of the reason
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen", "musicgen_melody",
         "mvp", "pegasus", "plbart", "prophetnet", "whisper"),
        "encoder-decoder",
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "reads those of another model"),
    "blt": "several models",
    "recurrent_gemma": "in its modules",
    "reformer": "hash buckets",
    **dict.fromkeys(("rwkv", "xlstm"), "has no attention"),
    "xlnet": "caches hidden states",
}  # fmt: skip
AS_TEXT = {"gemma3n": "gemma3n_text"}  # whose vision tower needs another package
TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING))
QUICK = ("llama4_text", "mllama")


def check(model_type: str) -> None:
    if model_type in AS_TEXT:
        whole = crosslayer.plan(default_config(model_type))
        assert whole.stored_bytes == crosslayer.plan(default_config(AS_TEXT[model_type])).stored_bytes
        return
    config = default_config(model_type)
    lengths = lengths_of(model_type, config)
    planned = {length: crosslayer.plan(config, length=length, dtype="bfloat16").stored_bytes for length in lengths}
    assert planned == allocated(config, lengths)


@pytest.mark.parametrize("model_type", [name for name in QUICK if name in TYPES])
def test_some_decoders_at_their_default_size(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in {*REFUSED, *QUICK}])
def test_every_decoder_at_its_default_size(model_type):
    check(model_type)


@pytest.mark.parametrize("model_type", [name for name in REFUSED if name in TYPES])
def test_what_is_refused_has_a_reason(model_type):
    with pytest.raises(ValueError, match=REFUSED[model_type]) as error:
        crosslayer.plan(default_config(model_type))
    assert "\n" not in str(error.value)
