"""Write the table of how large the caches of shipped models are, into docs/evidence/README.md and cache_sizes.json.

    python benchmarks/cache_sizes.py [--page FILE] [--json FILE]

A row is a model type of transformers whose default config has the cache of a shipped model; the name is that model's.
Beside them stand the types that `crosslayer plan` refuses, with the reason that it gives.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import crosslayer
from crosslayer.output.formatting import percent, readable_bytes
from crosslayer.wiring.states import field

RESULTS = Path(__file__).parents[1] / "docs" / "evidence"
PAGE = RESULTS / "README.md"
# what this script writes of the page; all else there is written by hand
SECTION = re.compile(
    r"(?<=<!-- benchmarks/cache_sizes.py writes from here -->\n\n).*(?=\n<!-- to here -->\n)", re.DOTALL
)
LENGTHS = (8192, 32_768, 131_072)
SHIPPED = {  # model type → the model whose cache its default config has
    "axk1": "skt/A.X-K1",
    "bitnet": "microsoft/bitnet-b1.58-2B-4T",
    "cohere": "CohereForAI/c4ai-command-r-v01",
    "cwm": "facebook/cwm",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "deepseek_v32": "deepseek-ai/DeepSeek-V3.2-Exp",
    "deepseek_v4": "deepseek-ai/DeepSeek-V4-Flash-Base",
    "dory": "nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16",
    "ernie4_5": "baidu/ERNIE-4.5-0.3B-PT",
    "ernie4_5_moe": "baidu/ERNIE-4.5-21B-A3B-PT",
    "exaone": "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct",
    "falcon": "tiiuae/falcon-7b",
    "gemma": "google/gemma-7b",
    "gemma2": "google/gemma-2-2b",
    "gemma3n_text": "google/gemma-3n-E4B",
    "glm": "THUDM/glm-4-9b-chat",
    "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
    "glm_moe_dsa": "zai-org/GLM-5",
    "gpt_neox": "EleutherAI/gpt-neox-20b",
    "gpt_oss": "openai/gpt-oss-120b",
    "hy_v3": "tencent/Hy3-preview",
    "inkling2_text": "thinkingmachines/Inkling-2-Small-MXFP8",
    "internlm3": "internlm/internlm3-8b-instruct",
    "iquestcoder": "IQuestLab/IQuest-Coder-V1-40B-Instruct",
    "jamba": "ai21labs/Jamba-v0.1",
    "kolibri1": "Aleph-Alpha/Kolibri-1",
    "lfm3": "LiquidAI/LFM3-1.7B",
    "llama": "meta-llama/Llama-2-7b-hf",
    "llama4_text": "meta-llama/Llama-4-Scout-17B-16E",
    "longcat_flash": "meituan-longcat/LongCat-Flash-Chat",
    "mamba2": "mistralai/Mamba-Codestral-7B-v0.1",
    "mimo_v2_flash": "XiaomiMiMo/MiMo-V2-Flash",
    "minicpm3": "openbmb/MiniCPM3-4B",
    "minimax_m2": "MiniMaxAI/MiniMax-M2",
    "ministral3": "mistralai/Ministral-3-8B-Base-2512",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "olmo2": "allenai/OLMo-2-1124-7B",
    "olmo3": "allenai/Olmo-3-7B-Instruct",
    "olmo_hybrid": "allenai/Olmo-Hybrid-7B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phimoe": "microsoft/Phi-3.5-MoE-instruct",
    "qwen2_moe": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen3_5_moe_text": "Qwen/Qwen3.5-35B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "seed_oss": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "stablelm": "stabilityai/stablelm-3b-4e1t",
    "zamba2": "Zyphra/Zamba2-2.7B",
    "zaya": "Zyphra/ZAYA1-8B",
}
HEAD = """\
Bytes of the KV cache of one sequence in bfloat16, as transformers allocates it, by `python benchmarks/cache_sizes.py`
from the default configs of transformers {version}. The last two numbers are for 128k tokens: the bytes that attention
reads per token, and the size relative to a plain cache (keys and values, or latents, of every layer and token).
[cache_sizes.json](cache_sizes.json) has all lengths. Tests run models of these sizes without weights and compare their
caches with the counts ([how](../guides/inspect.md#how-large-is-the-cache-of-this-model)). Lengths may exceed a model's
training length. `crosslayer plan NAME` reads a model's own config on the Hub.

"""
REFUSED = """
### Not counted

These model types of transformers are rejected with a reason. Every other decoder is counted.

| reason | model types |
|---|---|
"""


def row_of(model_type: str, name: str) -> dict[str, Any]:
    """Return what the table says of a model."""
    config = AutoConfig.for_model(model_type)
    plan = crosslayer.plan(config, length=LENGTHS, dtype="bfloat16")
    return {
        "model": name,
        "model_type": model_type,
        "layers": len(plan.layers),
        "special": special(config, plan),
        "stored_bytes": {length: plan.stored_at(length) for length in LENGTHS},
        "read_bytes": {length: plan.read_at(length) for length in LENGTHS},
        "plain_bytes": {length: plan.full_at(length) for length in LENGTHS},
    }


def special(config: Any, plan: crosslayer.ModelPlan) -> str:
    """Return in words what a cache has beside keys and values of every layer and token."""
    masks = Counter(re.sub(r" as layer \d+", " of another layer", states.mask) for states in plan.layers)
    words = [] if set(masks) == {"full"} else [f"{count} × {mask}" for mask, count in masks.most_common()]
    text = config.get_text_config(decoder=True)
    if field(text, "kv_lora_rank") is not None:
        words.insert(0, "latents (MLA)")
    readers = sum(source not in (layer, None) for layer, source in enumerate(plan.plan.keys))
    if readers:
        words.append(f"{readers} layers read another's")
    passes = max(states.passes for states in plan.layers)
    if passes > 1:
        words.append(f"some layers run {passes} times")
    return "; ".join(words) or "–"


def refusals() -> dict[str, list[str]]:
    """Return the model types that are refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(model_type)
        except Exception:  # a class without defaults
            continue
        try:
            crosslayer.plan(config)
        except ValueError as error:
            names = {config.model_type, config.get_text_config(decoder=True).model_type}
            reason = re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "it", str(error))
            reasons.setdefault(reason, []).append(model_type)
    return reasons


def section(rows: list[dict[str, Any]], reasons: dict[str, list[str]]) -> str:
    """Return the section: a row per model, those that keep the least of a plain cache first."""
    head = [
        "model",
        "layers",
        *(f"{length // 1024}k" for length in LENGTHS),
        "read per token",
        "share of a plain cache",
        "special features",
    ]
    lines = [HEAD.format(version=transformers.__version__) + _line(head) + "|" + "---|" * len(head) + "\n"]
    for row in sorted(rows, key=_share):
        stored = [readable_bytes(row["stored_bytes"][length]) for length in LENGTHS]
        share = percent(_share(row), 1) if row["plain_bytes"][LENGTHS[-1]] else "no attention"
        read = readable_bytes(row["read_bytes"][LENGTHS[-1]])
        lines.append(_line([row["model"], str(row["layers"]), *stored, read, share, row["special"]]))
    lines.append(REFUSED)
    lines += [_line([reason, ", ".join(f"`{one}`" for one in types)]) for reason, types in reasons.items()]
    return "".join(lines)


def _share(row: dict[str, Any]) -> float:
    """Return which share of a plain cache a model stores at the longest length."""
    plain = row["plain_bytes"][LENGTHS[-1]]
    return row["stored_bytes"][LENGTHS[-1]] / plain if plain else 0.0


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Write the section and the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--json", type=Path, default=RESULTS / "cache_sizes.json")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [row_of(model_type, name) for model_type, name in SHIPPED.items()]
    written = section(rows, refusals())
    text, found = SECTION.subn(lambda _: written, options.page.read_text(encoding="utf-8"))
    assert found == 1, f"{options.page} must have the two comments between which the section stands, once"
    options.page.write_text(text, encoding="utf-8")
    record = {"transformers": transformers.__version__, "batch": 1, "dtype": "bfloat16", "models": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
