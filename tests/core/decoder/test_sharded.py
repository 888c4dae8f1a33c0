"""Two ranks of FSDP2 on gloo give the gradients of one process, for every method and family."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from crosslayer.testing import tiny as contract
from tests.helpers.cases import COMPOSITIONS, SHAPES, SINGLE, each

FAMILIES = ("cla, gemma2", "attnres, gpt2", "attnres, mixture of experts", "attnres, linear attention")
CASES = {name: (methods, {}) for name, methods in {**SINGLE, **COMPOSITIONS}.items()}
CASES |= {name: SHAPES[name] for name in FAMILIES}


def config_of(case: str):
    methods, changes = CASES[case]
    return contract.config_of(methods, **changes)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def gradients(model, ids):
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worker(rank, port, case, mixed, checkpointing, path):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        model = contract.build(config_of(case)).float()
        if checkpointing:
            model.activation_checkpointing_enable()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        found = {name: grad.full_tensor() for name, grad in gradients(model, contract.tokens(length=8)).items()}
        if rank == 0:
            save_file({name: grad.contiguous() for name, grad in found.items()}, path)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("case", each(CASES))
def test_two_ranks_equal_one(case, mixed, checkpointing, tmp_path):
    path = tmp_path / "gradients.safetensors"
    mp.spawn(worker, (free_port(), case, mixed, checkpointing, path), nprocs=2)
    found = load_file(path)
    model = contract.build(config_of(case)).float()
    if mixed:  # the same arithmetic in one process: parameters in bfloat16, tables of the rotary embedding not
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    expected = gradients(model, contract.tokens(length=8))
    assert set(found) == set(expected)
    for name, grad in expected.items():
        scale = grad.abs().max().item()
        gap = (grad.float() - found[name]).abs().max().item()
        # both ranks hold the same batch, so only the order of sums and roundings remain, 2⁻⁸ each in bfloat16
        assert gap <= (3e-2 if mixed else 1e-4) * scale + 1e-7, f"{name}: {gap / scale:.2e}"
