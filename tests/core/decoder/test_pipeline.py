"""Stages of a pipeline give the gradients of the whole decoder, and send what the formulas say."""

import os
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from crosslayer.core.decoder.cuts import find_cuts
from crosslayer.core.decoder.layer import CrossLayerDecoderLayer
from crosslayer.core.decoder.pipeline import pipeline_stages, stage_modules
from crosslayer.testing import tiny as contract
from tests.core.decoder.test_sharded import free_port
from tests.helpers.cases import CASES, each

BLOCK = 2  # sublayers: with 8 layers, 8 blocks
MICROBATCHES, LENGTH = 4, 6


def loss_of(logits, ids):
    """In the model's dtype, where transformers' loss is in float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_gradients(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, grad in expected.items():
        assert (grad - found[name]).abs().max() <= tolerance * grad.abs().max(), name


def run_in_turn(modules, ids, **options):
    """Forward and backward through all modules as a schedule runs them: inputs are leaves, missing gradients zeros."""
    values, calls = (ids,), []
    for module in modules:
        inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        outputs = module(*inputs, **options)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        calls.append((inputs, values))
    loss_of(values[0], ids).backward()
    for (inputs, _), (_, outputs) in zip(calls[:0:-1], calls[-2::-1], strict=True):
        wanted = [(out, value.grad) for out, value in zip(outputs, inputs, strict=True) if out.requires_grad]
        grads = [torch.zeros_like(out) if grad is None else grad for out, grad in wanted]
        torch.autograd.backward([out for out, _ in wanted], grads)


def other_families(case):
    config = contract.config_of(CASES[case][0], **CASES[case][1])
    others = config.num_local_experts is not None or bool(config.linear_layers) or config.plan.beyond_sharing
    return config.family != "llama" or others


OTHERS = [case for case in CASES if other_families(case)]


@pytest.mark.parametrize("case", OTHERS)
def test_other_families_are_refused(case):
    methods, shape = CASES[case]
    model = contract.build(contract.config_of(methods, **shape))
    with pytest.raises(ValueError, match="(only.*are|layers (cache|attend))"):
        stage_modules(model, ranks=2)


@pytest.mark.parametrize("case", each(case for case in CASES if case not in OTHERS))
def test_parts_equal_the_whole(case):
    methods, shape = CASES[case]
    model = contract.build(contract.config_of(methods, **{**shape, "tie_word_embeddings": False})).train()
    ids = contract.tokens(length=8)
    loss_of(model(ids, use_cache=False).logits, ids).backward()
    expected = gradients(model)
    model.zero_grad()
    modules = stage_modules(model, ranks=2, rounds=3)
    run_in_turn(modules, ids)
    check_gradients(gradients(model), expected, 1e-12)
    assert not any(queue for module in modules for queue in module.exchange.waiting.values())


def test_eager_parts_pass_on_queries_and_keys_but_no_maps():
    config = contract.config_of({"name": "uniattn", "superblocks": ((1, 2, 3, 4),)})
    model = contract.build(config).train()
    model.set_attn_implementation("eager")
    ids = contract.tokens(length=8)
    loss_of(model(ids, use_cache=False).logits, ids).backward()
    expected = gradients(model)
    model.zero_grad()
    modules = stage_modules(model, ranks=2, rounds=3)
    run_in_turn(modules, ids)
    # the softmax of transformers' eager attention is float32, which rounds maps that are computed again alike
    check_gradients(gradients(model), expected, 1e-6)


def test_parts_take_padding_and_checkpointing():
    model = contract.build(contract.config_of({"name": "attnres", "block": 2}, num_hidden_layers=4)).train()
    ids, mask = contract.tokens(length=8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    options = {"attention_mask": mask, "position_ids": positions}
    loss_of(model(ids, use_cache=False, **options).logits, ids).backward()
    expected = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable()
    run_in_turn(stage_modules(model, ranks=2, rounds=2), ids, **options)
    check_gradients(gradients(model), expected, 1e-12)


def test_parts_without_gradients_leave_nothing():
    model = decoder().eval()
    modules, values = stage_modules(model, ranks=2, rounds=4), (batch(),)
    with torch.no_grad():
        for module in modules:
            outputs = module(*values)
            values = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.testing.assert_close(values[0], model(batch(), use_cache=False).logits, rtol=0, atol=1e-12)
    assert not any(queue for module in modules for queue in module.exchange.waiting.values())


def test_parts_hold_each_weight_once_under_its_name():
    model = decoder()
    names = [name for module in stage_modules(model, ranks=2, rounds=2) for name in module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize(
    "message, shape, options",
    [
        ("4 ranks × 3 rounds = 12 stages, rising from 0 to at most 7, got [0, 0, 1", {}, {"ranks": 4, "rounds": 3}),
        ("got [0, 5, 4]", {}, {"ranks": 3, "starts": [0, 5, 4]}),
        ("got [1, 4]", {}, {"ranks": 2, "starts": [1, 4]}),
        ("set tie_word_embeddings=False", {"tie_word_embeddings": True}, {"ranks": 2}),
        ("keep must be one of 'nothing', 'received', 'all', got 'some'", {}, {"ranks": 2, "keep": "some"}),
    ],
)
def test_refusals(message, shape, options):
    model = contract.build(contract.config_of(None, num_hidden_layers=8, **shape))
    with pytest.raises(ValueError, match=re.escape(message)):
        stage_modules(model, **options)


def test_a_carry_that_cannot_be_sent_is_refused(monkeypatch):
    model = decoder()
    forward = CrossLayerDecoderLayer.forward

    def with_a_count(self, stream, carry, *args, **kwargs):
        stream, carry = forward(self, stream, carry, *args, **kwargs)
        return stream, {**carry, "count": 1}

    monkeypatch.setattr(CrossLayerDecoderLayer, "forward", with_a_count)
    with pytest.raises(ValueError, match="layer 4"):
        stage_modules(model, ranks=2)


@pytest.fixture
def alone():
    """A process group of one; memory that nobody has written holds the largest numbers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_integers_cross_cuts(alone, monkeypatch):
    """Layer 0 hands them on, layer 5 takes them for rows of a weight."""
    model = decoder()
    forward = CrossLayerDecoderLayer.forward

    def with_rows(self, stream, carry, *args, **kwargs):
        if self.self_attn.layer_idx == 0:
            carry = {**carry, "rows": torch.full(stream.shape[:2], 7, device=stream.device)}
        if self.self_attn.layer_idx == 5:
            stream = stream + self.mlp.gate_proj.weight[carry["rows"]]
        return forward(self, stream, carry, *args, **kwargs)

    monkeypatch.setattr(CrossLayerDecoderLayer, "forward", with_rows)
    loss_of(model(batch(), use_cache=False).logits, batch()).backward()
    expected = gradients(model)
    model.zero_grad()
    stages = pipeline_stages(model, torch.device("cpu"), rounds=2, keep="nothing")
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
    schedule.step(batch(), target=batch())
    check_gradients(gradients(model), expected, 1e-12)


def test_a_cut_within_a_block_sends_its_sum_too():
    """Four sublayers a block: before layer 4 cross two sources and the stream, before layer 5 one source more."""
    config = contract.config_of({"name": "attnres", "block": 4}, num_hidden_layers=8)
    between, within = find_cuts(config, [4, 5])
    assert len(between.numbers) == 2 + 1
    assert len(within.numbers) == 3 + 1


def sent_tensors(stage, counts):
    """Count in `counts` the bytes of what a stage sends."""
    for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
        operations = getattr(stage, name)

        def counted(chunk, name=name, operations=operations):
            sends = operations(chunk)
            counts[name] += sum(send.tensor.nbytes for send in sends)
            return sends

        setattr(stage, name, counted)


def decoder():
    config = contract.config_of({"name": "attnres", "block": BLOCK}, num_hidden_layers=8)
    return contract.build(config).train()


def batch():
    return contract.tokens(batch=2 * MICROBATCHES, length=LENGTH)


def worker(rank, ranks, rounds, keeps, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for keep in keeps:
        stages = pipeline_stages(decoder(), torch.device("cpu"), rounds, keep)
        if rounds == 1:
            schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
        else:
            schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
        inputs = (batch(),) if rank == 0 else ()
        schedule.step(*inputs, target=batch())  # the first step also exchanges shapes
        counts, losses = Counter(), []
        for stage in stages:
            stage.submod.zero_grad()
            sent_tensors(stage, counts)
        schedule.step(*inputs, target=batch(), losses=losses)
        assert not any(stages[0].submod.exchange.waiting.values())
        tensors = {name: grad for stage in stages for name, grad in gradients(stage.submod).items()}
        tensors |= {name: torch.tensor(count) for name, count in counts.items()}
        if losses:
            tensors["loss"] = torch.stack(losses).mean().detach()
        save_file(tensors, folder / f"{keep}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


def units(keep, ranks, rounds):
    """Sources sent up in a microbatch: the formulas of arXiv 2603.15031, and the embedding, which they leave out."""
    stages, blocks = ranks * rounds, 8 // (ranks * rounds)  # of a stage
    first = ranks * (ranks - 1) // 2 * blocks + ranks - 1
    return {
        "nothing": stages * (stages - 1) // 2 * blocks + stages - 1,
        "received": first + (rounds - 1) * ranks**2 * blocks + (rounds > 1),  # to rank 0 the embedding comes back once
        "all": first + (rounds - 1) * ranks * (ranks - 1) * blocks,  # nothing comes back to where it was computed
    }[keep]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "ranks, rounds", [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (4, 1), (4, 2)))]
)
def test_ranks_equal_one_process_and_send_what_the_formulas_say(ranks, rounds, tmp_path):
    keeps = ("nothing", "received", "all") if rounds > 1 else ("nothing", "received")
    arguments = (ranks, rounds, keeps, free_port(), tmp_path)
    method = "spawn" if torch.cuda.is_initialized() else "fork"  # a fork has imported everything
    mp.start_processes(worker, arguments, nprocs=ranks, start_method=method)
    model = decoder()
    loss = loss_of(model(batch(), use_cache=False).logits, batch())
    loss.backward()
    source = 2 * LENGTH * model.config.hidden_size * 8  # bytes, of a microbatch
    for keep in keeps:
        counts, found = Counter(), {}
        for rank in range(ranks):
            tensors = load_file(tmp_path / f"{keep}-{rank}.safetensors")
            for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
                counts[name] += tensors.pop(name).item()
            found |= tensors
        expected = MICROBATCHES * units(keep, ranks, rounds) * source
        assert counts == {"get_fwd_send_ops": expected, "get_bwd_send_ops": expected}, keep
        torch.testing.assert_close(found.pop("loss"), loss.detach(), rtol=1e-12, atol=0)
        check_gradients(found, gradients(model), 1e-12)
