"""A decoder as pipeline stages, for the schedules of `torch.distributed.pipelining`.

    stages = pipeline_stages(model, device, rounds=2)  # those of this rank
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss)
    schedule.step(*[ids] if rank == 0 else [], target=ids)

A stage sends the stream and those tensors of the carry that later layers read: shared states, sources of attention over
depth. If a rank runs several stages, tensors that it keeps are not sent to it again (cross-stage caching): a later
stage reads them detached, and stores their gradients for the stage that kept them.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from crosslayer.core.decoder.families import rotary_tables
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, CrossLayerModel, masks_of
from crosslayer.core.method import Carry, Residual
from crosslayer.core.pipeline.cuts import Cut, Traffic, find_cuts, find_traffic
from crosslayer.core.pipeline.rank_cache import Microbatch
from crosslayer.core.sources import BY_LAYER


def pipeline_stages(
    model: CrossLayerForCausalLM, device: torch.device, rounds: int = 1, keep: str = "all"
) -> list[PipelineStage]:
    """Return the stages of this rank, of ranks × rounds stages: stage c runs on rank c % ranks.

    The stages hold the model's own modules; those of this rank move to the device. Their names and parameters are those
    of the model, so `save_stages` writes a model that `from_pretrained` loads. Each call of a stage reads
    whole rows of ids (B, T): positions count from 0, and there is no padding.

    Args:
        model: the whole decoder, with the same weights on every rank; on the CPU if it does not fit on a device.
        device: the device of this rank.
        rounds: number of stages per rank.
        keep: tensors that a rank keeps for its later stages: "all"; only those "received", which is cross-stage caching
            as published (arXiv 2603.15031); "nothing".

    Raises:
        ValueError: the decoder cannot be split this way.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    modules = stage_modules(model, ranks, rounds, keep)
    mine = range(rank, len(modules), ranks)
    return [Stage(modules[stage].to(device), stage, len(modules), device) for stage in mine]


class Stage(PipelineStage):
    """A stage that infers shapes with zeros instead of uninitialized memory, which may hold invalid indices."""

    # torch's stages (2.13) call it for tensors that they know by shape and type alone
    def _to_tensor(self, arg: Any) -> Tensor:
        tensor = super()._to_tensor(arg)
        return tensor if isinstance(arg, Tensor) else tensor.detach().zero_().requires_grad_(tensor.requires_grad)


def stage_modules(model: CrossLayerForCausalLM, ranks: int, rounds: int = 1, keep: str = "all") -> list["StageModule"]:
    """Return the modules of the stages of all ranks; arguments and errors are those of `pipeline_stages`."""
    config, layers, stages = model.config, model.config.num_hidden_layers, ranks * rounds
    # what stages cannot run is refused with its alternative
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if stages > layers:
        raise ValueError(f"{ranks} ranks × {rounds} rounds need {stages} layers or more, got {layers}")
    if config.num_local_experts is not None:
        raise ValueError("a stage cannot return the balance loss of experts; train them with FSDP (train.fsdp)")
    if config.linear_layers:
        raise ValueError(
            f"layers {list(config.linear_layers)} have linear attention, which stages cannot run; train with FSDP"
        )
    if config.plan.beyond_sharing:
        raise ValueError(f"{config.plan.beyond_sharing}, so the model cannot be split into stages; train with FSDP")
    if config.tie_word_embeddings and stages > 1:
        raise ValueError("embedding and head are in different stages; set tie_word_embeddings=False")

    bounds = [stage * layers // stages for stage in range(stages + 1)]
    between = find_cuts(config, bounds[1:-1])
    cuts = (None, *between, None)
    traffic = find_traffic(between, ranks, keep)
    # a queue, since schedules begin several microbatches before a rank's next stage takes the first one
    waiting: list[dict[int, deque[Microbatch]]] = [defaultdict(deque) for _ in range(ranks)]
    return [
        StageModule(
            model,
            range(bounds[stage], bounds[stage + 1]),
            Exchange(stage, ranks, cuts[stage], cuts[stage + 1], traffic, waiting[stage % ranks]),
        )
        for stage in range(stages)
    ]


@dataclass(frozen=True)
class Exchange:
    """The tensors that a stage receives, keeps and sends.

    Attributes:
        stage: its number; the next stage on its rank is `stage + ranks`.
        ranks: number of ranks.
        before: the cut before the stage, None for the first stage.
        after: the cut after the stage, None for the last stage.
        traffic: which tensors all stages send and keep.
        waiting: by stage, the microbatches that wait for the stages of this rank, in order of arrival.
    """

    stage: int
    ranks: int
    before: Cut | None
    after: Cut | None
    traffic: Traffic
    waiting: dict[int, deque[Microbatch]]


class StageModule(nn.Module):
    """The module of a stage: some layers of the model, with the same weight names."""

    def __init__(self, model: CrossLayerForCausalLM, layers: range, exchange: Exchange):
        super().__init__()
        self.exchange, self.config, self.generation_config = exchange, model.config, model.generation_config
        self.softcap = model.softcap
        self.model = StageBody(model.model, layers, exchange)
        self.lm_head = model.lm_head if exchange.after is None else None

    def forward(self, *received: Tensor, **inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Map ids (B, T), or the tensors received, to the tensors to send, or to logits (B, T, V) in the last stage."""
        if inputs:
            raise ValueError(
                f"a stage takes ids alone, got {', '.join(inputs)}; instead of padding, pack texts into rows, or pad "
                "at the end and let the loss ignore these tokens"
            )
        exchange, traffic, stage = self.exchange, self.exchange.traffic, self.exchange.stage

        # the first stage of a rank begins a microbatch, each later one continues the one that has waited longest
        microbatch = Microbatch() if stage < exchange.ranks else exchange.waiting[stage].popleft()
        if exchange.before is None:
            (ids,) = received
            tensors = {}
            stream, carry = self.model(ids, {})
        else:
            tensors = dict(zip(traffic.sent[stage], received, strict=True))
            tensors = microbatch.restore(traffic.reused[stage], tensors, exchange.before.stream)
            stream, carry = self.model(*exchange.before.rebuild(tensors))
        if exchange.after is None:
            assert self.lm_head is not None
            logits = self.lm_head(stream)
            return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

        # The rank keeps sources that its later stages read. The next stage gets only sources that its own rank lacks.
        tensors = {**tensors, **exchange.after.take(stream, carry)}
        tensors = microbatch.keep(traffic.kept[stage], tensors, exchange.after.stream)
        if stage + exchange.ranks < len(traffic.sent):
            exchange.waiting[stage + exchange.ranks].append(microbatch)
        return tuple(tensors[number].contiguous() for number in traffic.sent[stage + 1])


class StageBody(nn.Module):
    """Some layers of the body; embeddings, final residual and final norm are None if they are in other stages."""

    def __init__(self, body: CrossLayerModel, layers: range, exchange: Exchange):
        super().__init__()
        first, last = exchange.before is None, exchange.after is None
        layer_types = body.config.layer_types
        assert layer_types is not None
        self.config, self.layer_types = body.config, layer_types[layers.start : layers.stop]
        self.embed_tokens: nn.Embedding | None = body.embed_tokens if first else None
        self.embed_positions: nn.Embedding | None = body.embed_positions if first else None
        self.layers = nn.ModuleDict({str(layer): body.layers[layer] for layer in layers})
        self.rotary_emb = body.rotary_emb
        self.final_residual: Residual | None = body.final_residual if last else None
        self.norm: nn.Module | None = body.norm if last else None

    def forward(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Run the layers; the first stage takes ids (B, T) as its stream, the last returns the last hidden states."""
        position_ids = torch.arange(stream.shape[1], device=stream.device).unsqueeze(0)  # (1, T)
        if self.embed_tokens is not None:
            stream = self.embed_tokens(stream)
            if self.embed_positions is not None:
                stream = stream + self.embed_positions(position_ids)
        masks = masks_of(self.config, self.layer_types, stream, None, position_ids)
        tables = {}
        if self.rotary_emb is not None:
            tables = rotary_tables(self.rotary_emb, self.layer_types, stream, position_ids)
        carry = {BY_LAYER: True, "read": stream.view_as(stream), **carry}
        for layer, layer_type in zip(self.layers.values(), self.layer_types, strict=True):
            stream, carry = layer(
                stream,
                carry,
                position_embeddings=tables.get(layer_type),
                attention_mask=masks[layer_type],
                position_ids=position_ids,
            )
        if self.final_residual is not None:
            stream, carry = self.final_residual(stream, carry)
        return stream if self.norm is None else self.norm(stream), carry
