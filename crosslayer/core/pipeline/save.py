"""One folder out of the stages of all ranks, which `from_pretrained` loads as the whole model."""

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.pipelining import PipelineStage
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from crosslayer.core.decoder.modeling import README, CrossLayerForCausalLM
from crosslayer.core.pipeline.stages import StageModule
from crosslayer.output.folder import whole_folder


def save_stages(stages: Sequence[PipelineStage], folder: str | Path) -> None:
    """Save the whole model in a new folder, in the format of `save_pretrained`; every rank calls it with its stages.

    Each rank writes the weights of its own layers, so that no rank needs memory for all of them. All ranks must see the
    same file system. The folder appears when it is complete. States of optimizers are not saved.

    Raises:
        ValueError: the folder exists, or a rank cannot write; on every rank, so that none waits for another.
    """
    rank, modules = dist.get_rank(), [stage.submod for stage in stages]
    assert all(isinstance(module, StageModule) for module in modules)
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            return str(stack.enter_context(whole_folder(Path(folder)))) if rank == 0 else ""

        partial = Path(on_all_ranks(begin)[0])
        shards = on_all_ranks(lambda: write_shard(modules, partial))

        def finish() -> None:
            if rank != 0:
                return
            files = {weight: shard["file"] for shard in shards for weight in shard["weights"]}
            index = {"metadata": {"total_size": sum(shard["bytes"] for shard in shards)}, "weight_map": files}
            (partial / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            config: Any = copy.deepcopy(modules[0].config)
            config.architectures, config.dtype = [CrossLayerForCausalLM.__name__], shards[0]["dtype"]
            config.save_pretrained(partial)
            generation_config: Any = modules[0].generation_config
            if generation_config is not None:
                generation_config.save_pretrained(partial)
            (partial / "README.md").write_text(README, encoding="utf-8")
            stack.close()  # the folder appears

        on_all_ranks(finish)


def write_shard(modules: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Write the weights of a rank's stages; return the name of the file, those of the weights, their bytes and type."""
    name = f"model-{dist.get_rank() + 1:05}-of-{dist.get_world_size():05}.safetensors"
    tensors = {key: value.detach().contiguous() for module in modules for key, value in module.state_dict().items()}
    # in a single stage: safetensors refuses two names of one memory, and `from_pretrained` ties them again
    if modules[0].config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / name, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    dtype = next(iter(tensors.values())).dtype
    return {"file": name, "weights": list(tensors), "bytes": size, "dtype": str(dtype).removeprefix("torch.")}


def on_all_ranks(step: Callable[[], Any]) -> list[Any]:
    """Run a step on every rank and return its results by rank; an error on one of them is raised on all."""
    result, message = None, None
    try:
        result = step()
    except (OSError, ValueError) as error:
        message = f"rank {dist.get_rank()}: {error}"
    # every rank takes part, also one that failed: the others would wait for it
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (result, message))
    messages = [message for _, message in answers if message is not None]
    if messages:
        raise ValueError(messages[0])
    return [result for result, _ in answers]
