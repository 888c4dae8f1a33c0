"""The page of released models: each row with a type is true of a tiny random model of that type."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

import crosslayer
from crosslayer.core.methods import load_methods
from crosslayer.probe.depth import depth_mixing
from crosslayer.probe.gates import output_gates
from crosslayer.probe.intercept import visited
from tests.helpers.shipped import SHIPPED, shipped
from tests.helpers.tiny import tiny, tokens
from tests.test_docs import rows

PAGE = "docs/methods/released.md"
HEAD = "| connection | models | type in transformers | field of the config | what crosslayer reads | command |"
ROWS = [row for row in rows(PAGE, HEAD) if "untested" not in row[2]]
MODELS = (
    "Inkling 2", "Kimi K3", "DeepSeek-V4", "GLM-5-Next", "HY-V4", "Qwen4-Exp", "Gemma 3n", "Gemma 4", "Mistral Large 4",
    "nanochat", "gpt-oss", "Qwen3-Next",
)  # fmt: skip


@cache
def model_of(family):
    if family not in SHIPPED:
        return tiny(family, dtype=torch.float32)
    return shipped(family, hidden_size=64) if family != "gemma4_text" else shipped(family)


@cache
def read(family):
    """What a pass shows, and what the config says."""
    model, calls = model_of(family), []
    with torch.no_grad(), depth_mixing(model) as depth, output_gates(model) as gates, visited(model, calls.append):
        model(input_ids=tokens(batch=1, length=20), use_cache=False)
    return depth, gates, calls, crosslayer.plan(model)


def has(claim, family):
    depth, gates, calls, plan = read(family)
    shared = [layer for layer, source in enumerate(plan.plan.keys) if source not in (None, layer)]
    chosen = [layer for layer, source in enumerate(plan.plan.choices) if source not in (None, layer)]
    return {
        "plan": lambda: plan.residual != "plain sum",
        "weights over depth": lambda: np.isfinite(depth.table()[:-1]).any(axis=1).all(),
        "weights of streams": lambda: np.isfinite(depth.by_stream().weights).all(axis=1).any(),
        "shared keys": lambda: bool(shared),
        "shared selection": lambda: bool(chosen),
        "output gates": lambda: bool(gates),
        "rows of less than one": lambda: all(call.sinks is not None for call in calls),
    }[claim]()


def cells(text):
    return [part.strip().strip("`") for part in text.split(",") if part.strip() != "–"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2].strip('`')}: {row[4]}")
def test_a_row_is_true_of_a_tiny_model(row):
    _, _, family, fields, claims, command = row
    family = family.strip("`")
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    config = AutoConfig.for_model(family)
    assert all(hasattr(config, name) for name in cells(fields))
    assert cells(claims) and all(has(claim, family) for claim in cells(claims))
    in_the_config = set(cells(claims)) <= {"plan", "shared keys", "shared selection"}
    assert command.strip("`") == f"crosslayer {'plan' if in_the_config else 'diagnose'} MODEL"


def test_the_page_names_every_model_and_its_methods_can_be_built():
    named = " ".join(row[1] for row in rows(PAGE, HEAD))
    assert [model for model in MODELS if model not in named] == []
    methods = [row[1].strip("`") for row in rows(PAGE, "| model | method |")]
    entries = [text for text in methods if text.startswith("{")]
    assert len(entries) == 3 and all(load_methods(json.loads(text)) for text in entries)


def test_the_table_of_methods_names_them():
    text = Path("README.md").read_text()
    assert all(model in text for model in ("Inkling 2", "Kimi K3", "DeepSeek-V4", "Gemma 3n", "Mistral Large 4"))
