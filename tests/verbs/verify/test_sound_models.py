"""Verification passes on models that are right, and leaves them as they were."""

import pytest
import torch

from crosslayer import verify
from crosslayer.core.checkpointing import is_checkpointing
from crosslayer.output.progress import metered_by
from crosslayer.verbs.verify.checks import CHECKS
from tests.helpers.daily import daily
from tests.helpers.meters import Recorder
from tests.helpers.saved import METHODS, ours
from tests.helpers.tiny import tiny
from tests.helpers.verifications import by_name, only


@pytest.mark.parametrize("method", daily(METHODS, "cla"))
def test_every_row_passes_on_ours(method):
    first, *rows = verify(ours(method), dtypes=("float32",), compile_backend="aot_eager").checks
    assert first.status == "NOT APPLICABLE" and "local folder" in first.reason
    assert [row for row in rows if row.status != "PASS"] == [] and len(rows) == len(CHECKS)
    assert all(row.difference is not None and row.tolerance is not None for row in rows)


def test_every_row_passes_on_a_stock_llama_in_two_dtypes_and_leaves_it_alone():
    model, meter = tiny("llama", dtype=torch.float32).train(), Recorder()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config
    model.model.embed_tokens.weight.requires_grad_(False)
    with metered_by(meter):
        verification = verify(model, compile_backend="eager")
    assert {row.status for row in verification.applicable} == {"PASS"} and verification.passed
    total = 2 * len(CHECKS)
    assert meter.works == [("verifying", total)]
    named = [f"{name}, {dtype}" for dtype in ("float32", "bfloat16") for name in CHECKS]
    assert meter.steps[1:] == [*((i, total, name) for i, name in enumerate(named)), (total, total, "")]
    assert meter.steps[0] == (0, total, "manifest and plain pass")
    # the logits' own tolerance, and that of what must be equal
    assert len({row.tolerance for row in verification.checks if row.dtype == "bfloat16"}) > 1
    assert model.training and model.dtype == torch.float32
    assert not is_checkpointing(model)
    assert model.config.to_dict() == config and model.config._attn_implementation == "sdpa"
    assert model.generation_config is generation
    assert not model.model.embed_tokens.weight.requires_grad and model.lm_head.weight.requires_grad
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # from inductor's own modules
def test_inductor_passes():
    row = by_name(verify(ours("cla"), dtypes=("float32",)))["compiled"]
    assert row.status == "PASS", row


def test_cache_bytes_know_sliding_windows(monkeypatch):
    only(monkeypatch, "cache bytes")
    for family in ("mistral", "gemma3_text", "gemma2"):
        row = verify(tiny(family, dtype=torch.float32), dtypes=("float32",)).checks[1]
        assert row.status == "PASS" and row.difference == 0, row
