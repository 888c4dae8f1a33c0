"""Stages of a pipeline give the loss and gradients of the whole decoder, and send what the formulas say."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.pipeline.run import SENDS, formula, free_port, loss_of, send_counts
from crosslayer.core.pipeline import pipeline_stages
from crosslayer.core.pipeline.cuts import KEPT, find_cuts
from crosslayer.core.pipeline.stages import stage_modules
from crosslayer.testing import tiny as contract
from tests.helpers.cases import CASES

MICROBATCHES, LENGTH = 4, 6
METHODS = ("attnres", "attnres + cla", "uniattn, two blocks", "resformer", "mudd + drop")
FAMILIES = (
    "attnres + drop compensated, gemma2",
    "resformer + attnres, gemma3",
    "attnres, gpt2",
    "resformer + cla, gpt2",
)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_gradients(found, expected, tolerance=1e-12):
    assert set(found) == set(expected)
    for name, grad in expected.items():  # that of a bias of keys is zero, but for rounding
        assert (grad - found[name]).abs().max() <= tolerance * max(grad.abs().max(), 1e-3), name


def run_in_turn(modules, ids):
    """Forward and backward through all modules as a schedule runs them: inputs are leaves, missing gradients zeros."""
    values, calls = (ids,), []
    for module in modules:
        inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        outputs = module(*inputs)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        calls.append((inputs, values))
    loss = loss_of(values[0], ids)
    loss.backward()
    for (inputs, _), (_, outputs) in zip(calls[:0:-1], calls[-2::-1], strict=True):
        wanted = [(out, value.grad) for out, value in zip(outputs, inputs, strict=True) if out.requires_grad]
        grads = [torch.zeros_like(out) if grad is None else grad for out, grad in wanted]
        torch.autograd.backward([out for out, _ in wanted], grads)
    return loss


@pytest.mark.parametrize("case", METHODS + FAMILIES)
@pytest.mark.parametrize("way", ["sdpa", "eager", "checkpointing"])
def test_stages_equal_the_whole(case, way):
    methods, shape = CASES[case]
    config = contract.config_of(methods, **{**shape, "tie_word_embeddings": False})
    model = contract.build(config).train()
    if way == "checkpointing":
        model.activation_checkpointing_enable()
    else:
        model.set_attn_implementation(way)
    ids = contract.tokens(length=8)
    whole = loss_of(model(ids, use_cache=False).logits, ids)
    whole.backward()
    expected = gradients(model)
    model.zero_grad()
    modules = stage_modules(model, ranks=2, rounds=3)
    torch.testing.assert_close(run_in_turn(modules, ids), whole, rtol=1e-12, atol=0)
    # eager attention has maps in float32: a stage builds those again that are shared across its cut
    check_gradients(gradients(model), expected, 1e-6 if way == "eager" else 1e-12)
    assert not any(queue for module in modules for queue in module.exchange.waiting.values())


def test_a_cut_within_a_block_sends_its_sum_too():
    """Four sublayers a block: before layer 4 cross two sources and the stream, before layer 5 one source more."""
    config = contract.config_of({"name": "attnres", "block": 4}, num_hidden_layers=8)
    between, within = find_cuts(config, [4, 5])
    assert len(between.numbers) == 2 + 1
    assert len(within.numbers) == 3 + 1


REFUSED = [
    ({"num_local_experts": 4}, "FSDP"),
    (CASES["linear attention"][1], "FSDP"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=False"),
    ({"num_hidden_layers": 5}, "6 layers"),
]


@pytest.mark.parametrize(("shape", "hint"), REFUSED, ids=str)
def test_what_cannot_be_split_is_refused_with_an_alternative(shape, hint):
    model = contract.build(contract.config_of(None, **shape))
    with pytest.raises(ValueError, match=hint):
        stage_modules(model, ranks=2, rounds=3)


def test_padding_is_refused_with_an_alternative():
    ids = contract.tokens()
    for module in stage_modules(decoder(), ranks=2):
        with pytest.raises(ValueError, match="attention_mask.*pack"):
            module(ids, attention_mask=torch.ones_like(ids))


def decoder():
    config = contract.config_of({"name": "attnres", "block": 2}, num_hidden_layers=8)
    return contract.build(config).train()


def batch():
    return contract.tokens(batch=2 * MICROBATCHES, length=LENGTH)


def worker(rank, ranks, rounds, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for keep in KEPT:
        stages = pipeline_stages(decoder(), torch.device("cpu"), rounds, keep)
        if rounds == 1:
            schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
        else:
            schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
        inputs = (batch(),) if rank == 0 else ()
        schedule.step(*inputs, target=batch())  # the first step also exchanges shapes
        counts, losses = send_counts(stages), []
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*inputs, target=batch(), losses=losses)
        assert not any(stages[0].submod.exchange.waiting.values())
        tensors = {name: grad for stage in stages for name, grad in gradients(stage.submod).items()}
        tensors |= {name: torch.tensor(counts[name]) for name in SENDS}
        if losses:
            tensors["loss"] = torch.stack(losses).mean().detach()
        save_file(tensors, folder / f"{keep}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


@pytest.mark.slow  # two or four processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks, rounds", [(2, 2), (2, 1), (4, 1), (4, 2)])
def test_ranks_equal_one_process_and_send_what_the_formulas_say(ranks, rounds, tmp_path):
    method = "spawn" if torch.cuda.is_initialized() else "fork"  # a fork has imported everything
    mp.start_processes(worker, (ranks, rounds, free_port(), tmp_path), nprocs=ranks, start_method=method)
    model = decoder()
    loss = loss_of(model(batch(), use_cache=False).logits, batch())
    loss.backward()
    source = 2 * LENGTH * model.config.hidden_size * 8  # bytes, of a microbatch
    for keep in KEPT:
        counts, found = Counter(), {}
        for rank in range(ranks):
            tensors = load_file(tmp_path / f"{keep}-{rank}.safetensors")
            for name in SENDS:
                counts[name] += tensors.pop(name).item()
            found |= tensors
        expected = MICROBATCHES * sum(formula(ranks, rounds, keep)) * source
        assert counts == {"up": expected, "down": expected}, keep
        torch.testing.assert_close(found.pop("loss"), loss.detach(), rtol=1e-12, atol=0)
        check_gradients(found, gradients(model))
