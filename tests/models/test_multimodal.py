"""Models that also read images are loaded with the class that their folder names, and used for text."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

import crosslayer
from tests.helpers.text import WORDS, tokenizer

SIZE = len(WORDS) + 8
TEXT = {
    "vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
TOWER = {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
IDS = dict(zip(("image_token_id", "video_token_id", "vision_start_token_id"), range(SIZE - 8, SIZE), strict=False))
FAMILIES = {
    "qwen2_5_vl": {"text_config": {**TEXT, **SECTIONS}, "vision_config": QWEN, **IDS},
    "qwen3_vl": {
        "text_config": {**TEXT, **SECTIONS}, "vision_config": {**QWEN, "deepstack_visual_indexes": [0]}, **IDS,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_token_id": SIZE - 8,
    },
    "gemma3": {"text_config": TEXT, "vision_config": TOWER, "image_token_index": SIZE - 8},
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(request.param, **FAMILIES[request.param]))
    model.save_pretrained(tmp_path / "model")
    tokenizer(unk_token="[UNK]").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_text_model_is_measured_and_continues_text(folder):
    model, words = crosslayer.load_model(str(folder), device="cpu")
    assert type(model).__name__.endswith("ForConditionalGeneration")
    ids = words("w1 w2 w3", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(input_ids=ids).logits[0, -1].argmax())
    written = crosslayer.generate(str(folder), "w1 w2 w3", max_new_tokens=1, device="cpu")
    assert written.text == words.decode(best)
    assert written.cache_bytes == crosslayer.plan(str(folder), length=ids.shape[1], dtype="float32").stored_bytes
    diagnosis = crosslayer.diagnose(str(folder), sequences=1, length=48, device="cpu")
    assert diagnosis.map_similarity.shape == (3, 3)


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True)
def test_it_is_verified_with_the_class_that_its_folder_names(folder):
    result = crosslayer.verify(str(folder), dtypes=["float32"], device="cpu", compile_backend="eager")
    (check,) = [check for check in result.checks if check.name == "save and load"]
    assert (check.status, check.reason) == ("PASS", "must be bit-identical")
