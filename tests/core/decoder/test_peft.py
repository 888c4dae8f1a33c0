"""LoRA by peft on the decoder, W_c included."""

import pytest
import torch

from crosslayer.testing import tiny as contract
from tests.helpers.cases import CASES
from tests.helpers.tiny import tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("case", ["llama", "cla", "uniattn", "uniattn heads", "uniattn mlp", "drop compensated"])
def test_lora_adapts_every_linear_layer(case, tmp_path):
    base, ids = contract.build(contract.config_of(*CASES[case][:1])), tokens(length=8)
    linear = {name for name, module in base.model.named_modules() if isinstance(module, torch.nn.Linear)}
    with torch.no_grad():
        expected = base(ids, use_cache=False).logits
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")).double()
    adapted = {name for name, module in base.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == linear
    assert any("compensation" in name for name in adapted) == (case not in ("llama", "cla"))
    contract.close(expected, model.eval()(ids, use_cache=False).logits, "LoRA at its start")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == ("lora_" in name), name
    with torch.no_grad():
        trained = model.eval()(ids, use_cache=False).logits
        assert (trained - expected).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(contract.build(base.config), tmp_path).double().eval()
        contract.close(trained, again(ids, use_cache=False).logits, "adapter saved and loaded", 1e-5)  # in float32
        contract.close(trained, model.merge_and_unload()(ids, use_cache=False).logits, "merged", 1e-8)


def test_modules_that_are_saved_whole():
    base = contract.build(contract.config_of(*CASES["uniattn, two blocks"][:1]))
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["compensation"]}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    model(input_ids=tokens(length=8), labels=tokens(length=8)).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "compensation.modules_to_save" in name}
    assert len(grads) == 2 and all(grad.any() for grad in grads.values())
