"""accelerate's offloading: modules whose parameters lie elsewhere, and come when a module is called."""

import accelerate
import numpy as np
import pytest
import torch

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.probe.depth import depth_mixing
from crosslayer.testing import tiny as contract
from tests.helpers.cases import CASES, SINGLE
from tests.helpers.tiny import tokens

OTHERS = ("llama", "attnres blocks", "mudd residual", "uniattn heads", "linear attention", "mixture of experts")


@pytest.fixture(params=[*SINGLE, *OTHERS])
def model(request):
    methods, changes = CASES[request.param]
    return contract.build(contract.config_of(methods, **changes))


def run(model, ids):
    """Return logits by a pass, and by steps with a cache."""
    with torch.no_grad():
        return torch.cat([model(ids, use_cache=False).logits, contract.steps(model, ids, [5, 1, 2])[0]])


def test_parameters_that_lie_on_the_cpu(model):
    ids = tokens(length=8)
    expected = run(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    contract.close(run(model, ids), expected, "offloaded", contract.tolerance(model.config))


@pytest.mark.slow  # offloading to memory is tested every day
def test_layers_that_lie_on_a_disk(model, tmp_path):
    ids = tokens(length=8)
    expected = run(model, ids)
    model.save_pretrained(tmp_path)
    device_map = {f"model.layers.{layer}": "disk" for layer in range(6)}
    device_map |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    options = {"dtype": torch.float64, "experts_implementation": model.config._experts_implementation}
    again = CrossLayerForCausalLM.from_pretrained(
        tmp_path, device_map={**device_map, "lm_head": "cpu"}, offload_folder=tmp_path / "offload", **options
    )
    assert all(parameter.is_meta for parameter in again.model.layers.parameters())
    contract.close(run(again.eval(), ids), expected, "on a disk", contract.tolerance(model.config))


def test_weights_over_depth_are_recorded_of_an_offloaded_model():
    model, ids = contract.build(contract.config_of("attnres")), tokens(batch=1, length=8)
    with depth_mixing(model) as expected, torch.no_grad():
        model(ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with depth_mixing(model) as result, torch.no_grad():
        model(ids)
    assert result.readers == expected.readers and len(result.readers) == 13
    np.testing.assert_array_equal(result.table(), expected.table())
