"""Checks that every method must pass, for authors of methods: `check_method(MyMethod())`, or one test per check.

    import pytest
    from crosslayer.testing import CHECKS, config_of
    from my_methods.mine import Mine

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_mine(check):
        check(config_of(Mine(by=0.5)))

A check is a function of a `CrossLayerConfig` that raises `AssertionError`. Compared runs use the same modules in
float64 with logits up to about 10, so that `TOLERANCE` only allows for the order of sums (see `tolerance`).

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from crosslayer.cache.running import quantized_cache, smaller_cache
from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, method_class, method_names
from crosslayer.core.plan import CACHED
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.intercept import visited
from crosslayer.testing.tiny import (
    ROUNDED,
    SHAPE,
    VOCABULARY,
    build,
    close,
    config_of,
    elements,
    predicted,
    same,
    steps,
    tokens,
    tolerance,
)
from crosslayer.wiring.kv_bits import KvBits

Check = Callable[[CrossLayerConfig], None]


def check_method(methods: Entry | Sequence[Entry], **shape: Any) -> None:
    """Run every check on a method, or on several methods together, in a tiny decoder.

    Args:
        methods: a `Method` or its class, its name, {"name": …, option: …}, or a list of them.
        shape: fields of the config that differ from `SHAPE`, such as `num_hidden_layers=9`.

    Raises:
        AssertionError: a check fails; the message begins with its name.
        ValueError: the config refuses the methods or the shape.
    """
    config = config_of(methods, **shape)
    for check in CHECKS:
        try:
            check(config)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


@torch.no_grad()
def cached_equals_full(config: CrossLayerConfig) -> None:
    """Logits with a cache, in one pass or in chunks, equal those without; the cache has the plan's size."""
    model, ids = build(config), tokens(length=12)
    full = model(ids, use_cache=False).logits
    close(model(ids, use_cache=True).logits, full, "use_cache on and off", tolerance(config))
    for sizes in ([1] * 12, [5, 4, 3], [7, 1, 4]):
        chunked, cache = steps(model, ids, sizes)
        close(chunked, full, f"chunks of {sizes}", tolerance(config))
        # a sliding cache keeps the tokens that the next one attends to, in memory that holds the last chunk too
        windowed = None if config.sliding_window is None else config.sliding_window - 1 + sizes[-1]
        _holds(cache, predicted(config, 2, 12, windowed), f"chunks of {sizes}")
    chunked, cache = steps(model, ids, [7, 1, 4], DynamicCache())
    close(chunked, full, "a cache made without the config", tolerance(config))
    _holds(cache, predicted(config, 2, 12), "a cache made without the config")


@torch.no_grad()
def static_equals_dynamic(config: CrossLayerConfig) -> None:
    """Logits with a static cache equal those without a cache; its size is the plan's for its full length."""
    model, ids = build(config), tokens(length=12)
    chunked, cache = steps(model, ids, [7, 1, 1, 1, 1, 1], StaticCache(config=config, max_cache_len=16))
    close(chunked, model(ids, use_cache=False).logits, "static cache", tolerance(config))
    _holds(cache, predicted(config, 2, 16, config.sliding_window), "static cache")


@torch.no_grad()
def cropping_and_reordering(config: CrossLayerConfig) -> None:
    """Generation continues correctly after reordering a cache's rows or cropping its end (if possible)."""
    model, ids = build(config), tokens(length=12)
    full = model(ids, use_cache=False).logits
    _, cache = steps(model, ids[:, :8], [8])
    cache.reorder_cache(torch.LongTensor([1, 0]))
    close(steps(model, ids.flip(0)[:, 8:], [4], cache)[0], full.flip(0)[:, 8:], "after reordering", tolerance(config))
    # a window's cache has lost the tokens before it, and a linear state cannot go back
    if config.sliding_window is None and not config.linear_layers:
        _, cache = steps(model, ids, [12])
        cache.crop(-4)
        close(steps(model, ids[:, 8:], [4], cache)[0], full[:, 8:], "after cropping", tolerance(config))
        _holds(cache, predicted(config, 2, 12), "after cropping")


@torch.no_grad()
def beam_search_equals_uncached(config: CrossLayerConfig) -> None:
    """Three beams give the same tokens and scores with and without a cache, so reordering covers all states."""
    model: Any = build(config)
    ids = tokens(length=6)
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "output_scores": True, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    cached = model.generate(ids, use_cache=True, **options)
    plain = model.generate(ids, use_cache=False, **options)
    same(cached.sequences, plain.sequences, "beam search")
    close(cached.sequences_scores, plain.sequences_scores, "beam search scores", tolerance(config))


@torch.no_grad()
def generation_modes_agree(config: CrossLayerConfig) -> None:
    """Static cache, prompt lookup, assistant and embeddings give greedy's tokens; sampling agrees for equal seeds."""
    model: Any = build(config)
    ids = tokens(batch=1, length=8)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, **options)
    plain = ids
    for _ in range(4):
        plain = torch.cat([plain, model(plain, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    same(greedy, plain, "greedy")
    static = {"cache_implementation": "static", "disable_compile": True}
    same(model.generate(ids, **options, **static), greedy, "static cache")
    embeddings = model.get_input_embeddings()(ids)
    same(model.generate(inputs_embeds=embeddings, **options), greedy[:, 8:], "inputs_embeds")
    if config.sliding_window is None and not config.linear_layers:  # assisted decoding crops the cache
        same(model.generate(ids, **options, prompt_lookup_num_tokens=2), greedy, "prompt lookup")
        same(model.generate(ids, **options, assistant_model=build(config)), greedy, "assisted")
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampled.append(model.generate(ids, **{**options, "do_sample": True}, use_cache=use_cache))
    same(sampled[0], sampled[1], "sampling with and without a cache")
    close(model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:], "logits_to_keep", tolerance(config))


@torch.no_grad()
def eager_equals_sdpa(config: CrossLayerConfig) -> None:
    """Eager attention gives the logits of SDPA, with transformers' eager softmax in the model's dtype, not float32."""
    model, ids = build(config), tokens(length=8)
    sdpa = model(ids).logits
    model.set_attn_implementation("eager")
    with mock.patch.object(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: scores.softmax(dim)):
        close(model(ids).logits, sdpa, "eager and SDPA", tolerance(config))


@torch.no_grad()
def quantized_cache_cuts_make_no_difference(config: CrossLayerConfig) -> None:
    """With a quantized cache, a text read in pieces, padded, or without a cache gives the same logits.

    A model whose layers read states of several layers or chosen tokens, or that has none to quantize, is refused by a
    `ValueError`.
    """
    model, ids = build(config), tokens(length=16)
    bits = KvBits("4", everywhere="int4", recent=5)
    plan = config.plan
    counts = [plan.read_count(state, layer) for state in CACHED for layer in range(plan.layers)]
    several = max(counts) > 1
    windows = config.sliding_window is not None and "full_attention" not in (config.layer_types or [])
    if several or windows or plan.beyond_sharing:
        why = plan.beyond_sharing or ("several layers" if several else "no layer")
        _refuses(lambda: quantized_cache(model, bits), why)
        return
    allowed = tolerance(config, ROUNDED)
    with smaller_cache(model, bits=bits) as new_cache:
        full = model(ids, use_cache=False).logits
        for sizes in ([16], [1] * 16, [9, 1, 6]):
            close(steps(model, ids, sizes, new_cache())[0], full, f"quantized, chunks of {sizes}", allowed)
        # in float64 transformers' eager attention returns NaN for fully masked rows
        if config.attn_logit_softcapping is not None:
            return
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        options = {"attention_mask": mask, "position_ids": positions, CACHE: new_cache(), "use_cache": True}
        padded = model(torch.cat([ids[:1], torch.cat([ids[1:, :3], ids[1:, :-3]], 1)]), **options).logits
        close(padded[1, 3:], full[1, :-3], "quantized and padded", allowed)


@torch.no_grad()
def left_padding_equals_single_runs(config: CrossLayerConfig) -> None:
    """A left-padded row gives the same logits and generated tokens as alone."""
    model: Any = build(config)
    # in float64 transformers' eager attention returns NaN for fully masked rows
    if config.attn_logit_softcapping is not None:
        model = model.float()
    long, short = tokens(batch=1, length=10), tokens(batch=1, length=6, seed=1)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = model(batch, attention_mask=mask, position_ids=positions).logits
    close(logits[1, 4:], model(short).logits[0], "left-padded row", tolerance(config))
    close(logits[0], model(long).logits[0], "unpadded row", tolerance(config))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **options)
    alone = model.generate(short, attention_mask=torch.ones_like(short), **options)
    same(together[1, 4:], alone[0], "left-padded generation")


@torch.no_grad()
def wiring_matches_the_plan(config: CrossLayerConfig) -> None:
    """Readers attend with exactly the tensors of their sources, and have no projection for these states."""
    plan, model = config.plan, build(config)
    calls = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(tokens(length=8))
    fields = {"queries": lambda call: call.query, "keys": lambda call: call.key, "values": lambda call: call.value}
    names = {name for name, _ in model.named_parameters()}
    for state, tensor in fields.items():
        for layer, source in enumerate(plan.sources(state)):
            exists = f"model.layers.{layer}.self_attn.{state[0]}_proj.weight" in names
            assert exists == (layer in plan.own_layers(state)), f"layer {layer}: {state[0]}_proj exists: {exists}"
            # a layer that combines several sources has states of its own
            if not isinstance(source, int):
                continue
            for second in calls:
                equal = torch.equal(tensor(calls[layer]), tensor(calls[second]))
                agrees = equal == (plan.sources(state)[second] == source)
                assert agrees, f"layer {layer}: {state} equal layer {second}'s: {equal}, by the plan {not equal}"


@torch.no_grad()
def combines_with_shared_states(config: CrossLayerConfig) -> None:
    """Where another method shares states, readers have none of their own: the mixers get None and must return it."""
    layers = config.num_hidden_layers
    for sharing in (method_class(name) for name in method_names()):
        states = sharing.saves
        if not states:
            continue
        try:
            together = config_of([*config.methods, sharing.example(layers)], num_hidden_layers=layers)
        except ValueError:
            continue  # the config says that the two exclude one another
        model, ids = build(together), tokens(length=6)
        try:
            full = model(ids, use_cache=False).logits
        except (TypeError, AttributeError) as error:
            raise AssertionError(f"layers that read {' and '.join(states)} of another layer: {error}") from error
        close(steps(model, ids, [4, 1, 1])[0], full, f"cached, with shared {' and '.join(states)}")


@torch.no_grad()
def causal(config: CrossLayerConfig) -> None:
    """Changing a token changes its own logits and later ones (by more than 1e-6), but no earlier ones."""
    model, ids = build(config), tokens(length=10)
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCABULARY
    before = model(ids).logits
    after = model(changed).logits
    close(after[:, :6], before[:, :6], "tokens before a changed token", tolerance(config))
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-6, "a changed token changes nothing"


def gradients_equal_under_checkpointing(config: CrossLayerConfig) -> None:
    """Every parameter gets a non-zero gradient, which is the same under activation checkpointing."""
    ids = tokens(length=8)
    gradients = []
    for checkpointing in (False, True):
        model = build(config).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, plain in gradients[0].items():
        assert plain is not None and plain.abs().max() > 0, f"{name} gets no gradient"
        close(gradients[1][name], plain, f"gradient of {name} under checkpointing", tolerance(config))


def save_and_load_are_bit_equal(config: CrossLayerConfig) -> None:
    """AutoModel loads a saved model with the same plan, methods, weights and, bit for bit, logits."""
    model, ids = build(config), tokens(length=8)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options: Any = {"dtype": torch.float64, "experts_implementation": config._experts_implementation}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    again, info = loaded
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], f"loading has {key}: {sorted(map(str, info[key]))}"
    assert again.config.plan == config.plan, f"the loaded plan is {again.config.plan}, not {config.plan}"
    assert again.config.methods == config.methods, f"the loaded methods are {again.config.methods}"
    with torch.no_grad():
        same(again.eval()(ids).logits, model(ids).logits, "logits of the loaded and of the saved model")


@torch.no_grad()
def conversion_initialises_like_a_new_model(config: CrossLayerConfig) -> None:
    """A converted Llama has all weights and buffers; new ones have the initial values of a new model."""
    values = config.to_dict()
    source = LlamaForCausalLM(LlamaConfig(**{name: values[name] for name in (*SHAPE, "head_dim")})).double()
    converted: Any = convert_weights(source, config.methods).model
    states = dict([*converted.named_parameters(), *converted.named_buffers()])
    empty = [name for name, state in states.items() if state.is_meta]
    assert not empty, f"a converted Llama has no values for {', '.join(empty)}"
    assert converted(tokens(length=8)).logits.isfinite().all(), "a converted Llama's logits are not finite"

    # a method that takes over weights in its own way sets other values
    if not isinstance(converted, CrossLayerForCausalLM):
        return
    if any(type(method).inherit is not Method.inherit for method in config.methods):
        return
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        new: Any = CrossLayerForCausalLM._from_config(converted.config, dtype=torch.float64)
        drawn.append(dict([*new.named_parameters(), *new.named_buffers()]))
    first, second = drawn
    for name in set(first) - set(source.state_dict()):
        # what two seeds give alike is not drawn at random
        if torch.equal(first[name], second[name]):
            same(states[name], first[name], f"first values of {name}, converted and new")


def reentrant_is_refused(config: CrossLayerConfig) -> None:
    """Reentrant checkpointing, which loses gradients of shared states, raises a `ValueError`."""
    model = build(config)
    for enable in (model.activation_checkpointing_enable, model.gradient_checkpointing_enable):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _refuses(lambda enable=enable: enable({"use_reentrant": True}), "use_reentrant")


def documented(config: CrossLayerConfig) -> None:
    """Each method's module docstring has an indented equation and entries Flows, Reads, Cache and Source."""
    for method in config.methods:
        text = inspect.getdoc(inspect.getmodule(type(method))) or ""
        for word in ("Flows:", "Reads:", "Cache:", "Source:"):
            assert word in text, f"{method.name()}: the module's docstring lacks {word!r}"
        assert "\n\n    " in text, f"{method.name()}: the module's docstring has no equation, indented by 4 spaces"
        # a dataclass without a docstring gets its signature instead
        about = type(method).__doc__ or ""
        signature = f"{type(method).__name__}("
        assert about and not about.startswith(signature), f"{method.name()}: the class has no docstring"


def compiled_equals_eager(config: CrossLayerConfig, backend: str = "aot_eager") -> None:
    """A compiled full graph gives the logits of the plain model; it takes seconds, so `CHECKS` does not include it.

    The tolerance for Inductor is 1e-5: it fuses the norms, which compute in float32, and rounds in another order.
    """
    torch._dynamo.reset()
    model, ids = build(config), tokens(length=8)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
    close(compiled, plain, f"compiled with {backend}", 1e-5 if backend == "inductor" else tolerance(config))


def _refuses(call: Callable[[], Any], expected: str) -> None:
    """Assert that a call raises a `ValueError` whose message contains `expected`."""
    try:
        call()
    except ValueError as error:
        assert expected in str(error), f"the ValueError must name {expected}, got: {error}"
    else:
        raise AssertionError(f"expected a ValueError that names {expected}, got none")


def _holds(cache: Cache, expected: int, what: str) -> None:
    count = elements(cache)
    assert count == expected, f"{what}: the cache holds {count} elements, by the plan {expected}"


# checks that depend on a method's options and on shapes, and checks that run once per method
BY_OPTIONS: tuple[Check, ...] = (
    cached_equals_full,
    static_equals_dynamic,
    cropping_and_reordering,
    beam_search_equals_uncached,
    generation_modes_agree,
    eager_equals_sdpa,
    left_padding_equals_single_runs,
    quantized_cache_cuts_make_no_difference,
    wiring_matches_the_plan,
    causal,
    gradients_equal_under_checkpointing,
    save_and_load_are_bit_equal,
)
BY_METHOD: tuple[Check, ...] = (
    conversion_initialises_like_a_new_model,
    combines_with_shared_states,
    reentrant_is_refused,
    documented,
)
CHECKS: tuple[Check, ...] = (*BY_OPTIONS, *BY_METHOD)

__all__ = ["CHECKS", "BY_METHOD", "BY_OPTIONS", "check_method", "compiled_equals_eager", "config_of"]
