"""What a model or a machine lacks is said, and what cannot be verified is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig
from transformers.models.llama import modeling_llama

from crosslayer import verify
from crosslayer.core.decoder.convert import to_model
from tests.cli.test_cli import run
from tests.helpers.tiny import tiny
from tests.helpers.verifications import by_name, only


def test_what_a_model_or_machine_lacks_is_not_applicable(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none():
        raise InvalidCxxCompiler

    only(monkeypatch, "compiled", "static cache", "eager and SDPA")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    rows = by_name(verify(to_model(tiny("gemma2", dtype=torch.float32)), dtypes=("float32",)))
    assert {rows[name].status for name in ("compiled", "eager and SDPA")} == {"NOT APPLICABLE"}
    assert "needs a C++ compiler" in rows["compiled"].reason and "no SDPA" in rows["eager and SDPA"].reason
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_can_compile_fullgraph", False)
    rows = by_name(verify(tiny("llama", dtype=torch.float32), dtypes=("float32",)))
    assert rows["static cache"].status == "NOT APPLICABLE" and "one graph" in rows["static cache"].reason


def test_bad_input(monkeypatch, capsys):
    for dtypes in ((), ("float33",), ("float32", "float32")):
        with pytest.raises(ValueError, match="`dtypes`.*float32"):
            verify(tiny("llama"), dtypes=dtypes)
    with pytest.raises(ValueError, match="BertModel"):
        verify(tiny("bert"))
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="KV cache.*MambaForCausalLM"):
        verify(mamba)
    with pytest.raises(ValueError, match="22 positions,.*12"):
        verify(tiny("llama", max_position_embeddings=12))
    for words, message in ((["minilm"], "needs a causal LM"), (["./nowhere"], "does not exist")):
        assert run(monkeypatch, "verify", *words) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
