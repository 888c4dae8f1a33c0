"""vLLM itself serves our models: its tokens and log probabilities are ours, its cache is as small as the plan says.

It needs an environment of its own, which `make test-serving` makes.
"""

import copy
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import crosslayer
from crosslayer.testing.tiny import build, config_of, tokens
from crosslayer.verbs.serve.caches import flags_of, untested
from tests.helpers.cases import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make test-serving"),
]
SCRIPT = Path(__file__).with_name("by_vllm.py")
PROMPTS = [[3, 25, 7, 7, 12, 41, 9, 33, 2, 18, 57, 5], [10, 20, 30, 44, 55, 62, 37]]
NEW = 12
CLOSE = 1e-3  # of log probabilities in float32; vLLM adds in another order
SHAPE = {"head_dim": 32, "max_position_embeddings": 256}  # its attention on CPUs has no smaller heads
# threads are not bound to cores: by itself vLLM gives each process a NUMA node of its own
TWO_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
DROPPED = [{"name": "drop", "attention": (2, 4)}]


def by_vllm(jobs, **environment):
    """Answers of vLLM to jobs, one engine after the other in a single process."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    done = subprocess.run([sys.executable, SCRIPT], input=json.dumps(jobs), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


def job(folder, prompts=PROMPTS, new=NEW, **options):
    return {"folder": str(folder), "prompts": prompts, "new": new, "options": options}


def model_of(methods, **shape):
    """A tiny model in float32 whose weights are random enough for its tokens to differ."""
    return build(config_of(methods, **SHAPE, **shape)).float()


@torch.no_grad()
def check(model, answer, prompts=PROMPTS, close=CLOSE):
    """Each token is the likeliest where another is not as likely within `close`; log probabilities are as near."""
    for prompt, chosen, logprobs in zip(prompts, answer["tokens"], answer["logprobs"], strict=True):
        ids = torch.tensor([prompt + chosen])
        ours = model(ids, use_cache=False).logits[0].log_softmax(-1)  # (T, V)
        expected = ours[:-1].gather(1, ids[0, 1:, None])[:, 0][-len(logprobs) :]
        assert (expected - torch.tensor(logprobs)).abs().max() < close
        for row, token in zip(ours[len(prompt) - 1 : -1], chosen, strict=True):
            best, second = row.topk(2).values
            assert token == row.argmax() or best - second < close


WIRINGS = {
    "llama": CASES["llama"][0],
    "cla": CASES["cla"][0],
    "drop": DROPPED,
    "drop, W_c": [{"name": "drop", "attention": (2, 4), "compensation": "attention"}],
    "drop of the first": [{"name": "drop", "attention": (0, 3)}],
    "attnres + cla": [{"name": "attnres", "block": 4}, "cla"],
    **{case: CASES[case][0] for case in (
        "resformer", "svformer", "uniattn", "uniattn heads", "neutreno", "denseformer", "attnres", "mudd", "fusedkv",
        "hyper_connections", "identity_mapping", "cla, a source of three", "resformer + cla", "yoco",
    )},
}  # fmt: skip


def test_tokens_and_log_probabilities_are_ours(tmp_path):
    models = {name: model_of(methods) for name, methods in WIRINGS.items()}
    for number, model in enumerate(models.values()):
        model.save_pretrained(tmp_path / str(number))
    answers, log = by_vllm([job(tmp_path / str(number)) for number in range(len(models))])
    for model, answer in zip(models.values(), answers, strict=True):
        check(model, answer)
    held = {name: answer["kv_tokens"] for name, answer in zip(models, answers, strict=True)}
    assert held["cla"] / held["llama"] == pytest.approx(2, rel=0.01)
    assert held["drop"] / held["llama"] == held["drop, W_c"] / held["llama"] == pytest.approx(1.5, rel=0.01)
    assert held["svformer"] == held["uniattn"] == held["llama"]
    assert "layers 1-5 store" in log


def test_windows_and_other_families(tmp_path):
    """Sliding windows, beside whole attention and shared; Gemma 2 caps scores and logits."""
    models = {}
    for case in ("cla, sliding windows", "gemma2", "uniattn + resformer, gemma2"):
        methods, changes = CASES[case]
        models[case] = model_of(methods, **{name: value for name, value in changes.items() if name not in SHAPE})
        models[case].save_pretrained(tmp_path / case)
    answers, _ = by_vllm([job(tmp_path / case) for case in models])
    for model, answer in zip(models.values(), answers, strict=True):
        check(model, answer)


def test_worker_processes_load_the_plugin_and_compile(tmp_path):
    model = model_of(WIRINGS["cla"])
    model.save_pretrained(tmp_path / "model")
    ((answer,), _) = by_vllm([job(tmp_path / "model", enforce_eager=False)], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    check(model, answer)
    assert answer["kv_blocks"] == 64 * 2**20 // (3 * 2 * 2 * 32 * 4 * 32)  # caches, states, heads, size, bytes, tokens


@pytest.mark.parametrize("wiring", ["drop, W_c", "attnres + cla", "uniattn heads"])
def test_two_processes_give_the_tokens_of_one(tmp_path, wiring):
    """Each process has the same half of the heads of every layer, so that what layers share never leaves it."""
    model = model_of(CASES[wiring][0] if wiring in CASES else WIRINGS[wiring])
    model.save_pretrained(tmp_path / "model")
    ((answer,), _) = by_vllm([job(tmp_path / "model", tensor_parallel_size=2)], **TWO_PROCESSES)
    check(model, answer)


def test_prompts_in_pieces_that_are_reused_and_requests_that_are_put_off(tmp_path):
    """Prompts of several blocks, cut into pieces, sent twice, with too little cache for all of them at once."""
    model = model_of(WIRINGS["attnres + cla"])
    model.save_pretrained(tmp_path / "model")
    prompts = [tokens(1, 70, seed=number)[0].tolist() for number in range(3)]
    options = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 14 * 32 * 3 * 2 * 2 * 32 * 4,  # 14 blocks of 32 tokens; three requests end with 18
    }
    reused = {**job(tmp_path / "model", prompts, 120, **options), "new_logprobs_alone": True, "times": 2}
    ((answer,), _) = by_vllm([reused])
    check(model, answer, prompts)
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    assert answer["metrics"]["vllm:prefix_cache_hits"] > 0


def test_bfloat16_is_as_near_as_ours(tmp_path):
    model = model_of(WIRINGS["cla"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    model.save_pretrained(tmp_path / "model")
    ((answer,), _) = by_vllm([job(tmp_path / "model", dtype="bfloat16")])
    for prompt, chosen, logprobs in zip(PROMPTS, answer["tokens"], answer["logprobs"], strict=True):
        ids = torch.tensor([prompt + chosen])
        exact, rounded = (said(m, ids) for m in (model.float(), copy.deepcopy(model).bfloat16()))
        assert (torch.tensor(logprobs) - exact).abs().max() < 3 * (rounded - exact).abs().max()


@torch.no_grad()
def said(model, ids):
    """Our log probability of each token but the first, (T − 1,)."""
    return model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


CLOSE_8_BITS = 0.02
ZERO_ROUNDED = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rounded_to_zero(states, dtype):
    """Keys or values as vLLM's CPU kernels hold them in 8 bits: the next number of the type towards zero."""
    near = states.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    above = near.float().abs() > states.abs()  # the code below is that of the next smaller magnitude
    return (near.view(torch.uint8) - above.to(torch.uint8)).view(dtype).to(states.dtype)


@contextmanager
def caching_in(model, dtype, scales=None):
    """Run a model with keys and values rounded as in a cache of 8 bits, before layers read them.

    `scales` are those of keys and values by source layer of pairs, by default 1.
    """
    exact = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rounding(module, query, keys, values, *others, **options):
        pair = (1, 1) if scales is None else scales[module.layer_idx // 2 * 2]
        keys, values = (
            rounded_to_zero(s / scale, dtype) * scale for s, scale in zip((keys, values), pair, strict=True)
        )
        return exact(module, query, keys, values, *others, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = rounding
    try:
        yield model
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_a_cache_of_8_bits_gives_the_tokens_of_rounded_keys_and_values(tmp_path):
    """Readers and sources read the same rounded numbers.

    Log probabilities agree to 1e-6 up to a number that is rounded to another neighbor here than in vLLM, which moves
    them by up to 3e-3. Without rounding they differ by more than 0.1.
    """
    models = {name: model_of(WIRINGS[name]) for name in ("cla", "drop, W_c", "uniattn")}
    jobs = []
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        jobs += [job(tmp_path / name, kv_cache_dtype=kind) for kind in ZERO_ROUNDED]
    half = job(tmp_path / "cla", dtype="bfloat16")
    answers, _ = by_vllm([*jobs, half])
    for answer, (name, kind) in zip(answers, itertools.product(models, ZERO_ROUNDED), strict=False):
        with pytest.raises(AssertionError):
            check(models[name], answer, close=0.1)
        with caching_in(models[name], ZERO_ROUNDED[kind]) as model:
            check(model, answer, close=CLOSE_8_BITS)
    held = [answer["kv_tokens"] for answer in answers]
    assert held[0] / held[-1] == pytest.approx(2, rel=0.01) and held[2] / held[0] == pytest.approx(3 / 4, rel=0.01)


def with_weights(folder, weights, scheme):
    """Give a folder other weights, and say in its config how they are quantized."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **scheme}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))


def test_readers_have_the_scales_of_their_source(tmp_path):
    """Only layers that write have scales in the checkpoint; readers without them would move log probabilities by 2."""
    model = model_of(WIRINGS["cla"])
    model.save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    scales = {0: (0.25, 0.125), 2: (0.0625, 0.125), 4: (0.03125, 0.0625)}  # of keys and values
    for layer, pair in scales.items():
        for state, scale in zip("kv", pair, strict=True):
            weights[f"model.layers.{layer}.self_attn.{state}_scale"] = torch.tensor(scale)
    kind = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    with_weights(tmp_path / "model", weights, {"format": "dense", "config_groups": {}, "kv_cache_scheme": kind})
    ((answer,), _) = by_vllm([job(tmp_path / "model")])
    with caching_in(model, torch.float8_e4m3fn, scales=scales):
        check(model, answer, close=CLOSE_8_BITS)


# vLLM has two kernels for CPUs: one for AMX, bfloat16 and sizes that its tiles divide, and one for all others
@pytest.mark.parametrize(("dtype", "size", "close"), [("float32", 136, 0.02), ("bfloat16", 128, 0.1)])
def test_weights_and_activations_of_int8(tmp_path, dtype, size, close):
    """Closer to rounded weights and inputs than to the exact model; a number rounded otherwise moves them by 6e-3.

    With bfloat16 they differ by 0.053 (AMX).
    """
    model = model_of(WIRINGS["cla"], hidden_size=size, intermediate_size=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    projections = {name: layer for name, layer in model.named_modules() if name.endswith("_proj")}
    for name, layer in projections.items():
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        weights[f"{name}.weight"] = (layer.weight.detach() / scale).round().to(torch.int8)
        weights[f"{name}.weight_scale"] = scale
        layer.weight.data = weights[f"{name}.weight"] * scale
        layer.register_forward_pre_hook(lambda _, inputs: (in_int8(inputs[0]),))
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    with_weights(tmp_path / "model", weights, {"format": "int-quantized", "config_groups": {"all": group}})
    ((answer,), _) = by_vllm([job(tmp_path / "model", dtype=dtype)])
    check(model, answer, close=close)


def in_int8(inputs):
    """Inputs (…, C), each token rounded to 255 steps of its largest number."""
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    return (inputs / scale).round() * scale


def failure(folder, options=None, **environment):
    """The errors of a vLLM that must not start."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    words = json.dumps([job(folder, **(options or {}))])
    done = subprocess.run([sys.executable, SCRIPT], input=words, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    return done.stderr


def test_without_the_plugin_nothing_is_served(tmp_path):
    model_of(WIRINGS["cla"]).save_pretrained(tmp_path / "model")
    assert "model type `crosslayer`" in failure(tmp_path / "model", VLLM_PLUGINS="")


def test_what_it_cannot_hold_is_refused_in_a_line(tmp_path):
    model_of(CASES["cross_attention"][0]).save_pretrained(tmp_path / "model")
    line = "ValueError: vLLM cannot serve this crosslayer model: with cross_attention, layer "
    assert line in failure(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_sharing_fast_prefill": True}, "would see only the last token"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "this type of KV cache is untested"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}, "would read it as different types"),
        ({"enable_lora": True}, "LoRA adapters are untested"),
    ],
)
def test_what_was_not_tried_is_refused_in_a_line(tmp_path, options, words):
    model_of(WIRINGS["cla"]).save_pretrained(tmp_path / "model")
    lines = failure(tmp_path / "model", options, VLLM_ENABLE_V1_MULTIPROCESSING="1").splitlines()
    assert any("ValueError: vLLM" in line and words in line for line in lines)


@pytest.fixture(scope="module")
def decoder():
    """The class that vLLM builds, whose import registers functions of attention, which stay."""
    with warnings.catch_warnings(action="ignore"):
        from crosslayer.verbs.serve.model import CrossLayerForCausalLM
    return CrossLayerForCausalLM


@pytest.mark.filterwarnings("ignore")  # what vLLM's imports raise
@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("parallel_config", {"tensor_parallel_size": 4}, "over more than 2 processes"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline parallelism puts elsewhere"),
        ("model_config", {"quantization": "awq"}, "weights quantized in this way"),
        (None, {"lora_config": "any"}, "LoRA adapters are untested"),
    ],
)
def test_what_needs_more_than_is_here_is_refused(decoder, part, changes, words):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(quantization=None, hf_overrides=None, hf_config=config_of(WIRINGS["cla"])),
        speculative_config=None,
        lora_config=None,
    )
    assert untested(config.model_config.hf_config, flags_of(config)) is None
    vars(config if part is None else getattr(config, part)).update(changes)
    with pytest.raises(ValueError, match=words):
        decoder(vllm_config=config)


def test_an_export_needs_no_plugin(tmp_path):
    """DeciLM is a class of vLLM; its config lies in the folder."""
    model = model_of(DROPPED)
    crosslayer.export(model, tmp_path / "deci", to="deci")
    ((answer,), _) = by_vllm([job(tmp_path / "deci", trust_remote_code=True)], VLLM_PLUGINS="")
    check(model, answer)
    assert answer["kv_tokens"] == 64 * 2**20 // (4 * 2 * 2 * 32 * 4 * 32) * 32
