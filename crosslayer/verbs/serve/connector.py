"""vLLM's KV connector of a prompt store; only vLLM imports this module.

In the scheduler it finds the longest stored prefix of a prompt by the headers of blocks. In the worker it reads the
codes of that prefix, computes the states of each layer before its attention runs, and copies finished prompts out of
vLLM's cache; a thread encodes and writes them. A prefix that cannot be read after all is reported to vLLM, which
computes its tokens.

Shapes: n blocks of vLLM's cache, N tokens in each, H key-value heads, D head size, T tokens, W = 2 · H · D.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from crosslayer.codec import format
from crosslayer.codec.codec import load_codec
from crosslayer.codec.states import CodedLayer, turned
from crosslayer.codec.store import MISSES, PromptStore
from crosslayer.verbs.serve.caches import flags_of
from crosslayer.verbs.serve.plugin import logger
from crosslayer.verbs.serve.prompts import check_served, check_weights

# Prompts that are copied and not yet written; the next one waits, since each copy takes as much memory as its blocks.
WAITING = 2
# Digits, and bits of each, of the numbers that are written to find a layout: bfloat16 holds 7 bits exactly.
DIGITS, BITS = 4, 7


@dataclass(eq=False)
class Transfer:
    """Tokens of a prompt from position 0 on, (T,) uint32, and vLLM's blocks of those from position `start` on."""

    tokens: np.ndarray
    blocks: list[int]
    start: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """What the worker loads before a step, and saves after it."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True)
class CachedLayer:
    """A layer's part of vLLM's cache, (n, H, N, 2 D), and where a block, flat, has each token's state, (N · W,)."""

    cache: Tensor
    layout: Tensor
    shape: CodedLayer

    def states(self, copied: Tensor) -> Tensor:
        """Return the states (T, W), keys before rotation and values, of copied blocks, the first of a prompt."""
        # A codec predicts keys before rotation, and vLLM caches them after it.
        numbers = copied.flatten(1)[:, self.layout.to(copied.device)].view(-1, self.shape.width)
        return _turned(numbers, 0, self.shape, back=True)

    def write(self, blocks: Sequence[int], states: Tensor, start: int) -> None:
        """Write the states (T, W) of the positions from `start` on into blocks."""
        numbers = _turned(states, start, self.shape).to(self.cache.dtype)
        flat = torch.empty_like(numbers).view(len(blocks), -1)
        flat[:, self.layout] = numbers.view(len(blocks), -1)
        self.cache[torch.tensor(blocks, device=self.cache.device)] = flat.view(-1, *self.cache.shape[1:])


def _turned(numbers: Tensor, start: int, shape: CodedLayer, back: bool = False) -> Tensor:
    keys, values = numbers.split([shape.heads * shape.key, shape.heads * shape.value], 1)
    keys = turned(keys.unflatten(1, (shape.heads, shape.key)), start, shape, back)
    return torch.cat([keys.flatten(1), values.float()], 1)


def layout_of(attention: Any, cache: Tensor, shape: CodedLayer) -> Tensor:
    """Return where a block of a layer's cache (n, H, N, 2 D), flat, has the numbers of its tokens' states, (N · W,).

    Backends differ: on a CPU keys are transposed or in tiles. So the layer's own attention writes numbers into block 1
    of the empty cache (block 0 is never used), and they are found again.
    """
    tokens, heads = cache.shape[2], shape.heads
    order = torch.arange(tokens * shape.width, device=cache.device).view(tokens, shape.width)
    slots = torch.arange(tokens, 2 * tokens, device=cache.device)  # of block 1
    held = torch.zeros_like(order).flatten()
    # Each number of a block gets its own index, written digit by digit since the cache may be of 16 bits.
    for digit in range(DIGITS):
        part = (order >> BITS * digit) % 2**BITS
        key, value = part.to(cache.dtype).split([heads * shape.key, heads * shape.value], 1)
        key, value = (numbers.unflatten(1, (heads, -1)).contiguous() for numbers in (key, value))
        attention.impl.do_kv_cache_update(attention, key, value, cache, slots)
        held += cache[1].flatten().long() << BITS * digit
    cache[1].zero_()
    layout = held.argsort()
    # A backend that scales, quantizes or pads its input holds other numbers than were written.
    if not torch.equal(held[layout], order.flatten()):
        raise ValueError("`prompt_store` cannot read the KV cache of vLLM's attention backend; use another one")
    return layout


class PromptStoreConnector(KVConnectorBase_V1):
    """Loads prompts of a store into vLLM's cache, and saves them.

    vLLM makes one for its scheduler and one for its worker, and calls other hooks of each. A step calls, in this order:
    `get_num_new_matched_tokens`, `update_state_after_alloc` and `build_connector_meta` in the scheduler; then in the
    worker `start_load_kv`, for each layer `wait_for_layer_load`, and `wait_for_save`.

    `kv_connector_extra_config` has `store` (its URL), `codec` (its folder), perhaps `limit`, and `checked`, the
    fingerprint of the served weights if they were read already.

    Raises:
        ValueError: the model, its weights, or an option of vLLM does not go with a store.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._codec = load_codec(options["codec"])
        self._store = PromptStore(options["store"], self._codec, options.get("limit"))
        # With vLLM's other policy, a request with a damaged block would fail.
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError("kv_load_failure_policy must be recompute, so that a damaged block is read again")
        model = vllm_config.model_config
        config = AutoConfig.from_pretrained(model.model, trust_remote_code=False)
        check_served(self._codec, config, flags_of(vllm_config))
        # `serve` reads the weights before it starts vLLM. If vLLM was started in another way, they are read here, once.
        if role == KVConnectorRole.SCHEDULER and options.get("checked") != self._codec.model_print:
            check_weights(self._codec, model.model, config)
        # All layers must have one block table: windows have their own, and give up blocks.
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise ValueError("`prompt_store` needs layers whose caches hold all tokens in blocks of one size")
        self._size = groups[0].kv_cache_spec.block_size
        # of the scheduler
        self._matched: dict[str, int] = {}  # stored tokens of a request's prompt
        self._prefilling: dict[str, Any] = {}  # requests whose prompts are to be saved
        self._next = Transfers()
        # of the worker
        self._layers: dict[str, CachedLayer] = {}
        self._loading: list[tuple[Transfer, Iterator[tuple[str, Tensor]]]] = []
        self._failed: set[int] = set()  # blocks to report
        self._wrong: dict[int, int] = {}  # blocks whose prefix was not loaded, and the step
        self._step, self._in_flight = 0, vllm_config.max_concurrent_batches
        self._pool, self._saving = ThreadPoolExecutor(1), deque[Future[None]]()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is a miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are loaded between the graphs of layers."""
        return True

    def _usable(self, request: Any) -> int:
        """Return how many tokens of a prompt are stored: whole blocks before its last token.

        None are of prompts whose states depend on more than their tokens, or that are kept apart by a salt.
        """
        more = request.lora_request, request.mm_features, request.cache_salt
        if any(more) or request.prompt_embeds is not None or not request.prompt_token_ids:
            return 0
        # The last token is left out: vLLM needs its logits, so it must run at least that one.
        return (len(request.prompt_token_ids) - 1) // self._size * self._size

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens the store has behind those that vLLM holds, and that they are loaded in the step."""
        count = self._usable(request)
        name = request.request_id
        # vLLM may ask more than once before a request runs; the store is searched once.
        if name not in self._matched:
            self._matched[name] = 0
            try:
                self._matched[name] = self._store.match(np.array(request.prompt_token_ids[:count], np.uint32))
            except MISSES as error:
                logger.warning("the prompt store cannot be read: %s", error)
        # False means that the tokens are loaded within the step, layer by layer, and not between steps.
        return max(0, self._matched[name] // self._size * self._size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what a request loads, and whether its prompt is to be saved."""
        name = request.request_id
        if num_external_tokens:
            stop = self._matched[name] // self._size * self._size
            start = stop - num_external_tokens
            loaded = blocks.get_block_ids()[0][start // self._size : stop // self._size]
            self._next.loads.append(Transfer(np.array(request.prompt_token_ids[:stop], np.uint32), list(loaded), start))
        # From here on the request has blocks and runs, so `build_connector_meta` follows its prompt.
        if self._matched.get(name, 0) < self._usable(request):
            self._prefilling[name] = request

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """Return what a step loads, and the prompts that are complete behind it."""
        transfers, self._next = self._next, Transfers()
        for name, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._prefilling.get(name)
            count = 0 if request is None else self._usable(request)
            # A long prompt takes several steps. It is saved after the one that computes its last block.
            if request is not None and request.num_computed_tokens + scheduled >= count:
                del self._prefilling[name]
                computed = scheduler_output.kv_connector_block_state.get_block_ids(name)[0][: count // self._size]
                transfers.saves.append(Transfer(np.array(request.prompt_token_ids[:count], np.uint32), list(computed)))
        return transfers

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forget a request; its blocks are free, since a finished prompt was copied at the end of its step."""
        self._matched.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find out how the cache of each layer is laid out; it is empty."""
        names = sorted(kv_caches, key=extract_layer_index)
        attentions = self._vllm_config.compilation_config.static_forward_context
        sizes = [(shape.heads, self._size, shape.key + shape.value) for shape in self._codec.shapes]
        if [tuple(kv_caches[name].shape[1:]) for name in names] != sizes:
            raise ValueError(
                f"`prompt_store` needs layer caches of the shape (heads, block size, numbers) = {sizes[0]}"
            )
        # Layers with the same backend and shape have the same layout, so one of each is tested.
        known: dict[Any, Tensor] = {}
        for name, shape in zip(names, self._codec.shapes, strict=True):
            cache, attention = kv_caches[name], attentions[name]
            kind = type(attention.impl), cache.dtype, cache.shape, cache.stride()
            if kind not in known:
                known[kind] = layout_of(attention, cache, shape)
            self._layers[name] = CachedLayer(cache, known[kind], shape)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read the blocks that a step loads; they are decoded while layers wait for them."""
        for load in self._get_connector_metadata().loads:
            try:
                blocks = self._store.read(load.tokens, load.start)
            except MISSES as error:
                self._miss(load, error)
                continue
            device = next(iter(self._layers.values())).cache.device
            states = self._codec.decoder.layers(blocks, len(load.tokens), device)
            self._loading.append((load, zip(self._layers, states, strict=True)))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Decode and write the layers up to this one."""
        # `layers` decodes while it is read, so that the states of one layer at a time are in memory.
        for load, layers in list(self._loading):
            try:
                for name, states in layers:
                    self._layers[name].write(load.blocks, states[load.start - len(load.tokens) :], load.start)
                    if name == layer_name:
                        break
            except ValueError as error:  # written by another program: its SHA-256 is right, its codes are not
                self._loading.remove((load, layers))
                self._miss(load, error)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole prompts are copied behind the step."""

    def wait_for_save(self) -> None:
        """Copy the prompts that a step completed, and let a thread encode and write them."""
        for load, layers in self._loading:
            if next(layers, None) is not None:
                self._miss(load, "not all layers ran")
        self._loading.clear()

        for save in self._get_connector_metadata().saves:
            # A prompt with blocks that were not loaded has wrong states in this step, which must not be stored.
            if self._wrong.keys().isdisjoint(save.blocks):
                while len(self._saving) >= WAITING:
                    self._saving.popleft().result()
                # In the next step vLLM may give the blocks to another request, so they are copied now.
                copied = []
                for layer in self._layers.values():
                    copied.append(layer.cache[torch.tensor(save.blocks, device=layer.cache.device)].cpu())
                self._saving.append(self._pool.submit(self._save, save.tokens, copied))

        # Steps that were scheduled before vLLM heard of a miss read those blocks, too.
        self._step += 1
        self._wrong = {block: step for block, step in self._wrong.items() if self._step - step < self._in_flight}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded in this step; vLLM computes them."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Write what was copied."""
        self._pool.shutdown()

    def _miss(self, load: Transfer, reason: Any) -> None:
        logger.warning("a stored prompt cannot be loaded (%s); vLLM computes it", reason)
        self._failed |= set(load.blocks)
        self._wrong |= dict.fromkeys(load.blocks, self._step)

    @torch.inference_mode()
    def _save(self, tokens: np.ndarray, copied: list[Tensor]) -> None:
        dtype = format.DTYPES.index(str(copied[0].dtype).removeprefix("torch."))
        states = [layer.states(blocks) for layer, blocks in zip(self._layers.values(), copied, strict=True)]
        try:
            self._store.save_states(tokens, states, dtype)
        except MISSES as error:
            logger.warning("a prompt is not stored: %s", error)
