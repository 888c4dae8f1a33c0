"""A decoder as stages of a pipeline, for the schedules of `torch.distributed.pipelining`.

    stages = pipeline_stages(model, device, rounds=2)  # those of this rank
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss)
    schedule.step(*[ids] if rank == 0 else [], target=ids)

A stage hands on the stream and what later layers read of the carry: lent states, sources of attention over depth.
Where a rank runs several stages, what it keeps is not sent to it again (cross-stage caching): a later stage reads it
detached, and deposits its gradient with the stage that kept it.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from crosslayer.core.decoder.cuts import Cut, Traffic, find_cuts, find_traffic
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, CrossLayerModel, masks_of
from crosslayer.core.decoder.rank_cache import Microbatch
from crosslayer.core.method import TOKENS, Carry, Residual


def pipeline_stages(
    model: CrossLayerForCausalLM,
    device: torch.device,
    rounds: int = 1,
    keep: str = "all",
    starts: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[PipelineStage]:
    """Return the stages of this rank, of ranks × rounds stages: stage c runs on rank c % ranks.

    Args:
        model: the whole decoder, with the same weights on every rank.
        device: where this rank runs.
        rounds: how many stages a rank has.
        keep: what a rank keeps for its later stages: "all"; only what it has "received", which is cross-stage caching
            as published (arXiv 2603.15031); "nothing".
        starts: (stages,), the first layer of each; None spreads the layers evenly.
        group: the ranks; None for all.

    Raises:
        ValueError: the decoder cannot be split so.

    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    modules = stage_modules(model, ranks, rounds, keep, starts)
    mine = range(rank, len(modules), ranks)
    return [Stage(modules[stage], stage, len(modules), device, group=group) for stage in mine]


class Stage(PipelineStage):
    """A stage that tries its module on zeros, not on what lies in memory, which may be no index of anything."""

    def _to_tensor(self, arg: Any) -> Tensor:
        tensor = super()._to_tensor(arg)
        return tensor if isinstance(arg, Tensor) else tensor.detach().zero_().requires_grad_(tensor.requires_grad)


def stage_modules(
    model: CrossLayerForCausalLM, ranks: int, rounds: int = 1, keep: str = "all", starts: Sequence[int] | None = None
) -> list["StageModule"]:
    """Return the modules of the stages of all ranks; arguments and errors are those of `pipeline_stages`."""
    stages, layers = ranks * rounds, model.config.num_hidden_layers
    if starts is None:
        starts = [stage * layers // stages for stage in range(stages)]
    bounds = [*starts, layers]
    if len(starts) != stages or starts[0] != 0 or any(start >= end for start, end in pairwise(bounds)):
        raise ValueError(
            f"pipeline: {ranks} ranks × {rounds} rounds are {stages} stages, whose first layers must rise from 0 to at "
            f"most {layers - 1}; they are {list(starts)}"
        )
    config = model.config
    if "pipeline" not in config.modules.tried or config.num_local_experts is not None or config.linear_layers:
        raise ValueError(
            "pipeline: stages are built for decoders of Llama's kind, without experts and linear attention; this one "
            f"has family {config.family!r}, {config.num_local_experts or 'no'} experts and linear attention in layers "
            f"{list(config.linear_layers)}"
        )
    if model.config.tie_word_embeddings and stages > 1:
        raise ValueError("pipeline: embedding and head lie in different stages; set tie_word_embeddings=False")
    between = find_cuts(model.config, starts[1:])
    cuts = (None, *between, None)
    traffic = find_traffic(between, ranks, keep)
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
    """What a stage takes in and hands on.

    Attributes:
        stage: its number; the next stage on its rank is `stage + ranks`.
        ranks: how many there are.
        before: the cut before it, None for the first stage.
        after: the cut behind it, None for the last stage.
        traffic: what is sent and kept at all stages.
        waiting: by stage, the microbatches that wait for the stages of its rank; they pass all in the same order.

    """

    stage: int
    ranks: int
    before: Cut | None
    after: Cut | None
    traffic: Traffic
    waiting: dict[int, deque[Microbatch]]

    def arrive(self, received: Sequence[Tensor]) -> tuple[Microbatch, dict[int, Tensor]]:
        """Return the microbatch, and by their numbers the tensors that cross the cut before the stage."""
        microbatch = Microbatch() if self.stage < self.ranks else self.waiting[self.stage].popleft()
        if self.before is None:
            return microbatch, {}
        tensors = dict(zip(self.traffic.sent[self.stage], received, strict=True))
        return microbatch, microbatch.restore(self.traffic.reused[self.stage], tensors, self.before.stream)

    def depart(self, microbatch: Microbatch, tensors: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """Keep what later stages of the rank read, and return what the next stage is sent."""
        assert self.after is not None
        tensors = microbatch.keep(self.traffic.kept[self.stage], tensors, self.after.stream)
        if self.stage + self.ranks < len(self.traffic.sent):
            self.waiting[self.stage + self.ranks].append(microbatch)
        return tuple(tensors[number].contiguous() for number in self.traffic.sent[self.stage + 1])


class StageModule(nn.Module):
    """The module of a stage: a part of the model, under the names that it has there."""

    def __init__(self, model: CrossLayerForCausalLM, layers: range, exchange: Exchange):
        super().__init__()
        self.exchange = exchange
        self.model = StageBody(model.model, layers, exchange)
        self.lm_head = model.lm_head if exchange.after is None else None

    def forward(
        self, *received: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage is sent, or logits (B, T, V); from ids (B, T), or what this stage was sent."""
        microbatch, tensors = self.exchange.arrive(received)
        if self.exchange.before is None:
            stream, carry = self.model.begin(*received)
        else:
            stream, carry = self.exchange.before.rebuild(tensors)
        stream, carry = self.model(stream, carry, attention_mask, position_ids)
        if self.exchange.after is not None:
            return self.exchange.depart(microbatch, {**tensors, **self.exchange.after.take(stream, carry)})
        assert self.lm_head is not None
        return self.lm_head(self.model.end(stream, carry))


class StageBody(nn.Module):
    """A part of the body; the embedding, the final norm and what it reads are None where they lie in other stages."""

    def __init__(self, body: CrossLayerModel, layers: range, exchange: Exchange):
        super().__init__()
        first, last = exchange.before is None, exchange.after is None
        kinds = body.config.layer_types
        assert kinds is not None
        self.config, self.kinds = body.config, kinds[layers.start : layers.stop]
        self.embed_tokens: nn.Embedding | None = body.embed_tokens if first else None
        self.layers = nn.ModuleDict({str(layer): body.layers[layer] for layer in layers})
        assert body.rotary_emb is not None, "families without it are refused before"
        self.rotary_emb = body.rotary_emb
        self.final_residual: Residual | None = body.final_residual if last else None
        self.norm: nn.Module | None = body.norm if last else None
        self.reads_tokens = bool(body.token_readers)

    def begin(self, ids: Tensor) -> tuple[Tensor, Carry]:
        """Return what the first layer gets."""
        assert self.embed_tokens is not None
        return self.embed_tokens(ids), {TOKENS: ids} if self.reads_tokens else {}

    def forward(
        self, stream: Tensor, carry: Carry, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Carry]:
        """Run the layers."""
        if position_ids is None:
            position_ids = torch.arange(stream.shape[1], device=stream.device).unsqueeze(0)
        masks = masks_of(self.config, self.kinds, stream, attention_mask, position_ids)
        rotary = self.rotary_emb(stream, position_ids=position_ids)
        for layer, kind in zip(self.layers.values(), self.kinds, strict=True):
            stream, carry = layer(
                stream, carry, position_embeddings=rotary, attention_mask=masks[kind], position_ids=position_ids
            )
        return stream, carry

    def end(self, stream: Tensor, carry: Carry) -> Tensor:
        """Return the last hidden states (B, T, C)."""
        assert self.norm is not None
        if self.final_residual is not None:
            stream, carry = self.final_residual(stream, carry)
        return self.norm(stream)
