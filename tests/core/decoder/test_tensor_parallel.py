"""Tensor parallelism by transformers: two ranks on gloo give the logits and gradients of one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.testing import tiny as contract
from tests.core.decoder.test_sharded import free_port, gradients
from tests.helpers.cases import CASES, GEMMA3, each
from tests.helpers.tiny import tokens

BEFORE_AND_AFTER = [
    {"name": "uniattn", "superblocks": ((1, 2),), "compensation": "heads"},
    {"name": "drop", "attention": (4,), "compensation": "attention"},
]
NAMES = (
    "llama", "cla", "svformer", "uniattn", "uniattn heads", "uniattn mlp", "resformer", "attnres", "attnres blocks",
    "drop compensated", "resformer, biases, tied", "hyper_connections", "mudd", "mudd + uniattn", "fusedkv",
    "fusedkv lite", "cross_attention", "cla, qk-norm, biases", "identity_mapping", "neutreno", "denseformer",
    "yoco", "resformer + yoco + attnres", "uniattn + resformer, gemma2", "gpt2",
    "mixture of experts", "attnres, linear attention", "cla heads",
    "uniattn heads-from-values",
)  # fmt: skip
SHARDED = {name: CASES[name] for name in NAMES}
SHARDED |= {"resformer, qk-norm": (["resformer"], {"qk_norm": True}), "two W_c": (BEFORE_AND_AFTER, {})}
SHARDED |= {"cla, gemma3": (["cla"], {**GEMMA3, "num_key_value_heads": 2})}


@pytest.mark.parametrize("case", each(CASES))
def test_the_plan_names_what_is_there(case):
    methods, changes = CASES[case]
    model = CrossLayerForCausalLM(contract.config_of(methods, **changes))
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    assert set(model.tp_plan) <= {".".join("*" if part.isdigit() else part for part in n.split(".")) for n in named}
    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    for name in linear:
        assert ".".join("*" if part.isdigit() else part for part in name.split(".")) in model.tp_plan, name


def worker(rank, port, folders):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for folder in folders:
            config = DistributedConfig(tp_size=2)
            model = AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=config, dtype=torch.float64, experts_implementation="eager"
            )
            ids = tokens(length=8)
            with torch.no_grad():
                outputs = {"logits": model(ids, use_cache=False).logits}
                outputs["cached"] = contract.steps(model, ids, [5, 1, 2])[0]
            for name, grad in gradients(model, ids).items():
                outputs[name] = grad.full_tensor() if isinstance(grad, dist.tensor.DTensor) else grad
            if rank == 0:
                save_file({name: value.contiguous() for name, value in outputs.items()}, folder / "outputs.safetensors")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


@pytest.mark.slow  # two processes that import everything
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one(tmp_path):
    models = {
        name: contract.build(contract.config_of(methods, **changes)) for name, (methods, changes) in SHARDED.items()
    }
    folders = {name: tmp_path / name.replace(" ", "_") for name in models}
    for name, model in models.items():
        model.save_pretrained(folders[name])
    mp.spawn(worker, (free_port(), list(folders.values())), nprocs=2)
    for name, model in models.items():
        outputs, ids = load_file(folders[name] / "outputs.safetensors"), tokens(length=8)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        contract.close(outputs.pop("logits"), logits, f"{name}: logits", contract.tolerance(model.config))
        contract.close(outputs.pop("cached"), logits, f"{name}: cached logits", contract.tolerance(model.config))
        expected = gradients(model, ids)
        # routers, linear attention and Gemma's norms of heads compute in float32 whatever the dtype
        gemma_norms = model.config.qk_norm and model.config.components.gain_offset
        relative = 1e-5 if model.config.num_local_experts or model.config.linear_layers or gemma_norms else 1e-10
        assert set(outputs) == set(expected)
        for parameter, grad in expected.items():
            scale = grad.abs().max().item()
            gap = (grad - outputs[parameter]).abs().max().item()
            # a key's bias has no gradient but rounding where positions are learned
            assert gap <= relative * scale + 1e-15, f"{name}: gradient of {parameter}"
