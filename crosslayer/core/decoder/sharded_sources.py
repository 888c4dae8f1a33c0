"""Prompts of Attention Residuals with sources sharded along the sequence over the ranks of tensor parallelism.

    DistributedConfig(tp_size=2, tp_plan=sharded_sources(config))

Each sublayer's output is reduce-scattered instead of all-reduced. Each rank keeps and reads the sources of its own
T / P tokens, and the results are all-gathered. Training, and sequences whose length P does not divide, are not sharded.

Source: "Attention Residuals" (arXiv 2603.15031), memory-efficient prefilling.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel, TensorParallelLayer

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import Carry, Residual

ROWS, READER = "crosslayer_rows_by_sequence", "crosslayer_sharded_sources"


def sharded_sources(config: CrossLayerConfig) -> dict[str, str]:
    """Return what a language model changes in its tensor-parallel plan; ValueError for models that cannot."""
    wiring = config.wiring
    whole = config.num_local_experts or wiring.linear or any(wiring.compensation)
    if whole or not any(method.reads_sources for method in wiring.methods):
        raise ValueError("sharded sources need Attention Residuals, and no experts, linear attention or W_c")
    rows = [f"model.{name}" for name, style in config.base_model_tp_plan.items() if style == "rowwise"]
    sites = {f"model.layers.*.{site}_residual" for _, site in wiring.sublayers}
    return dict.fromkeys(rows, ROWS) | dict.fromkeys((*sites, "model.final_residual"), READER)


# not in training: the gradients of queries and gains would be those of each rank's own tokens
def _is_sharded(tokens: int, mesh: Any) -> bool:
    return not torch.is_grad_enabled() and tokens % mesh.size() == 0


class _Rows(RowwiseParallel):
    """Reduces and scatters the output (B, T, C) along the sequence."""

    def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
        style = RowwiseParallel(output_layouts=Shard(1)) if _is_sharded(output.shape[1], mesh) else RowwiseParallel()
        return style.transform_output_post_forward(module, output, mesh)


class _Reader(TensorParallelLayer):
    """Reads what the rank has of the sources; the first reader takes its part of the embedding."""

    def install_forward(self, module: Residual, mesh: Any) -> Residual:
        forward = module.forward

        def sharded(stream: Tensor, carry: Carry, update: Tensor | None = None) -> tuple[Tensor, Carry]:
            if update is not None:
                return forward(stream, carry, update)
            if module.is_first:
                carry = {**carry, READER: _is_sharded(stream.shape[1], mesh)}
            if not carry[READER]:
                return forward(stream, carry)
            if module.is_first:
                # a copy: a view would keep the whole sequence's embedding in memory
                stream = stream.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].clone()
            read, carry = forward(stream, carry)
            return DTensor.from_local(read, mesh, [Shard(1)], run_check=False).full_tensor(), carry

        module.forward = sharded
        return module


ALL_PARALLEL_STYLES.register(ROWS, _Rows())  # type: ignore[arg-type]
ALL_PARALLEL_STYLES.register(READER, _Reader())  # type: ignore[arg-type]
