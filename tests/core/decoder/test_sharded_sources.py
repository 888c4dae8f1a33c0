"""Sources sharded along the sequence: two ranks on gloo give the logits of one process and hold half of the bytes."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from crosslayer.core.decoder.sharded_sources import sharded_sources
from crosslayer.testing import tiny as contract
from tests.core.decoder.test_sharded import free_port
from tests.helpers.cases import EXPERTS
from tests.helpers.tiny import tokens

BLOCKS = {"full": {"name": "attnres"}, "blocks": {"name": "attnres", "block": 5}}


def source_bytes(model, ids):
    """Return logits, and the bytes of the memory that holds the sources in a prompt."""
    seen = []

    def see(module, args, output):
        seen.append(sum(source.untyped_storage().nbytes() for source in output[1]["attnres.sources"]))

    hook = model.model.final_residual.register_forward_hook(see)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    hook.remove()
    return logits, torch.tensor(seen)


def worker(rank, port, folders):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for folder in folders:
            options = {"dtype": torch.float64}
            plan = sharded_sources(contract.config_of([BLOCKS[folder.name]]))
            config = DistributedConfig(tp_size=2, tp_plan=plan)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)
            logits, count = source_bytes(model, tokens(length=8))
            odd, whole = source_bytes(model, tokens(length=7))
            with torch.no_grad():
                cached = contract.steps(model, tokens(length=8), [4, 1, 2, 1])[0]
            outputs = {"logits": logits, "bytes": count, "odd": odd, "whole": whole, "cached": cached}
            if rank == 0:
                save_file({name: value.contiguous() for name, value in outputs.items()}, folder / "outputs.safetensors")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


@pytest.mark.slow  # two processes that import everything
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one_and_hold_half(tmp_path):
    models = {name: contract.build(contract.config_of([method])) for name, method in BLOCKS.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    mp.spawn(worker, (free_port(), [tmp_path / name for name in models]), nprocs=2)
    for name, model in models.items():
        outputs = load_file(tmp_path / name / "outputs.safetensors")
        logits, whole = source_bytes(model, tokens(length=8))
        ids = tokens(length=8)
        sources = {"full": 13, "blocks": 4}[name]  # of 12 sublayers, and the embedding
        assert whole.item() == sources * ids.numel() * model.config.hidden_size * 8
        assert outputs["bytes"].item() == whole.item() / 2
        for key in ("logits", "cached"):
            contract.close(outputs[key], logits, f"{name}: {key}", 1e-10)
        odd, whole = source_bytes(model, tokens(length=7))
        contract.close(outputs["odd"], odd, f"{name}: odd", 1e-10)
        assert outputs["whole"].item() == whole.item()


@pytest.mark.parametrize(
    ("methods", "shape"),
    [
        (["cla"], {}),
        (["attnres"], EXPERTS),
        (["attnres", {"name": "uniattn", "superblocks": ((1, 2),), "compensation": "mlp"}], {}),
    ],
    ids=str,
)
def test_bad_input(methods, shape):
    with pytest.raises(ValueError, match="Attention Residuals"):
        sharded_sources(contract.config_of(methods, **shape))
