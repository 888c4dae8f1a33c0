"""Indexers: small scorers by which layers of some pretrained models choose the tokens that they attend to.

A *full* layer has an indexer of its own. A *shared* one attends to what the nearest layer below it that is full has
chosen. DeepSeek sparse attention, and IndexCache (arXiv 2603.12201), in models such as GLM-5.

Flows: the indices of the chosen tokens, from layer to layer. Reads: the layers behind a full one, up to the next.
Cache: a shared layer caches no keys of an indexer.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.core.choice import ChoiceMethod
from crosslayer.core.method import options_of
from crosslayer.probe.intercept import layer_stack

FULL, SHARED = "full", "shared"
IndexerTypes = Sequence[str | None]  # by layer: full, shared, or None without indexers


def can_share(config: PreTrainedConfig) -> bool:
    """Return whether a config says which layers share an indexer, as `indexer_types`."""
    return getattr(config.get_text_config(), "indexer_types", None) is not None


def chosen_tokens(config: PreTrainedConfig) -> int:
    """Return how many tokens an indexer chooses."""
    return config.get_text_config().index_topk


def with_tokens_of_indexers(method: ChoiceMethod, config: PreTrainedConfig) -> ChoiceMethod:
    """Return the method with the number of tokens that the model's indexers choose.

    Raises:
        ValueError: it has options that say how tokens are chosen.

    """
    tokens = chosen_tokens(config)
    by_indexers, idle = {"tokens": tokens, "sinks": 0, "window": 1}, []
    for option in options_of(method):
        value = vars(method)[option.name]
        if option.name != "groups" and value not in (option.default, by_indexers.get(option.name, option.default)):
            idle.append(option.name)
    if idle:
        raise ValueError(
            f"{method.name()}: {', '.join(idle)} has no effect on {config.get_text_config().model_type}, whose "
            f"indexers choose {tokens} tokens; remove it"
        )
    return dataclasses.replace(method, **by_indexers)


def find_indexers(model: PreTrainedModel) -> list[nn.Module | None]:
    """Return each layer's indexer, None where it has none of its own."""
    indexers: list[nn.Module | None] = []
    for layer in layer_stack(model):
        named = (module for name, module in layer.named_modules() if name.rpartition(".")[2] == "indexer")
        indexers.append(next(named, None))
    return indexers


def indexer_types(model: PreTrainedModel) -> list[str | None]:
    """Return which layers have an indexer of their own, share one, or attend without any."""
    config: Any = model.config.get_text_config()
    named = getattr(config, "indexer_types", None) or [None] * config.num_hidden_layers
    types: list[str | None] = []
    for indexer, kind in zip(find_indexers(model), named, strict=True):
        types.append(FULL if indexer is not None else SHARED if kind == SHARED else None)
    return types


def with_choices(types: IndexerTypes, choices: Sequence[int | None]) -> list[str | None]:
    """Return the types with which each layer attends to the choice of the layer that `choices` names.

    A layer without an entry, or with its own number, keeps its type; a shared one takes the choice of the nearest layer
    below that is left with an indexer.

    Raises:
        ValueError: a layer has no indexer, or another layer than the named one would choose for it.

    """
    changed = list(types)
    for layer, chooser in enumerate(choices):
        if chooser is not None and chooser != layer:
            changed[layer] = SHARED
    for layer, chooser in enumerate(choices):
        if chooser is None:
            continue
        if types[layer] is None:
            raise ValueError(f"layer {layer} has no indexer, so it cannot take the choice of layer {chooser}")
        below = layer
        while changed[below] == SHARED and below:
            below -= 1
        if changed[below] != FULL or below != chooser:
            nearest = f"the nearest is layer {below}" if changed[below] == FULL else "there is none"
            raise ValueError(
                f"layer {layer} cannot take the choice of layer {chooser}: it takes that of the nearest layer below "
                f"with an indexer, and {nearest}"
            )
    return changed


def pattern(choices: Sequence[int | None]) -> str:
    """Return choices as letters, a layer each: F for its own indexer or none, S for that of the nearest F below."""
    return "".join("F" if chooser in (None, layer) else "S" for layer, chooser in enumerate(choices))


@contextmanager
def shared_indexers(model: PreTrainedModel, types: IndexerTypes) -> Iterator[None]:
    """Let layers that have an indexer take another's choice where `types` says shared; undone on exit."""
    held: list[Any] = [None]  # the latest choice

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        held[0] = output

    def take(module: nn.Module, args: Any, output: Any) -> Any:
        return held[0].to(output.device)  # layers may be on several

    with ExitStack() as stack:
        for indexer, kind in zip(find_indexers(model), types, strict=True):
            if indexer is not None:
                stack.callback(indexer.register_forward_hook(take if kind == SHARED else keep).remove)
        yield
