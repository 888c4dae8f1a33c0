"""What every method must hold, as functions of a config; each raises AssertionError.

Both sides of each comparison run through the same modules in float64, so 1e-10 leaves room for the order of sums alone.
"""

import copy
import inspect
import warnings
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.method import load_method
from crosslayer.probe.visit import visited
from tests.tiny import VOCABULARY, tokens

TOLERANCE = 1e-10
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

Check = Callable[[CrossLayerConfig], None]


def config_of(methods, **changes) -> CrossLayerConfig:
    return CrossLayerConfig(cross_layer=methods, **{**SHAPE, **changes})


def build(config: CrossLayerConfig, cls=CrossLayerForCausalLM) -> CrossLayerForCausalLM:
    """Make a model in float64 with every parameter perturbed, those that begin at zero too."""
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def close(one, other, what, tolerance=TOLERANCE):
    gap = (one - other).abs().max().item()
    assert gap < tolerance, f"{what}: {gap:.2e}"


def elements(cache) -> int:
    """Allocated elements of a cache, from the storages themselves."""
    states = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in states)


def predicted(config, batch, length) -> int:
    states = sum(len(config.plan.stored(layer)) for layer in range(config.num_hidden_layers))
    return states * batch * length * config.num_key_value_heads * config.head_dim


@torch.no_grad()
def steps(model, ids, sizes, cache=None):
    """Run `ids` in chunks through a cache; return logits and cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    found, at = [], 0
    for size in sizes:
        found.append(model(ids[:, at : at + size], past_key_values=cache, use_cache=True).logits)
        at += size
    return torch.cat(found, 1), cache


@torch.no_grad()
def cached_equals_full(config):
    model, ids = build(config), tokens(length=12)
    full = model(ids, use_cache=False).logits
    close(full, model(ids, use_cache=True).logits, "use_cache on and off")
    for sizes in ([1] * 12, [5, 4, 3], [7, 1, 4]):
        found, cache = steps(model, ids, sizes)
        close(full, found, f"chunks of {sizes}")
        if config.sliding_window is None:
            assert elements(cache) == predicted(config, 2, 12), "stored elements are not the plan's"


@torch.no_grad()
def static_equals_dynamic(config):
    model, ids = build(config), tokens(length=12)
    cache = StaticCache(config=config, max_cache_len=16)
    found, cache = steps(model, ids, [7, 1, 1, 1, 1, 1], cache)
    close(model(ids, use_cache=False).logits, found, "static cache")
    if config.sliding_window is None:
        assert elements(cache) == predicted(config, 2, 16), "allocated elements of the static cache are not the plan's"


@torch.no_grad()
def cropping_and_reordering(config):
    if config.sliding_window is not None:
        return  # a sliding cache cannot be cropped
    model, ids = build(config), tokens(length=12)
    full = model(ids, use_cache=False).logits
    _, cache = steps(model, ids, [12])
    cache.crop(-4)
    close(full[:, 8:], steps(model, ids[:, 8:], [4], cache)[0], "after cropping")
    assert elements(cache) == predicted(config, 2, 12)
    _, cache = steps(model, ids[:, :8], [8])
    cache.reorder_cache(torch.tensor([1, 0]))
    close(full.flip(0)[:, 8:], steps(model, ids.flip(0)[:, 8:], [4], cache)[0], "after reordering")


@torch.no_grad()
def beam_search_equals_uncached(config):
    model, ids = build(config), tokens(length=6)
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "output_scores": True, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    cached = model.generate(ids, use_cache=True, **options)
    plain = model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, plain.sequences), "beam search: other tokens"
    close(cached.sequences_scores, plain.sequences_scores, "beam search scores")


@torch.no_grad()
def every_way_to_generate(config):
    """Greedy by static cache, prompt look-up and embeddings gives the tokens of greedy; sampling those of its seed."""
    model, ids = build(config), tokens(batch=1, length=8)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, **options)
    plain = ids
    for _ in range(5):
        plain = torch.cat([plain, model(plain, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, plain), "greedy"
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(greedy, model.generate(ids, **options, **static)), "static cache"
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(greedy[:, 8:], model.generate(inputs_embeds=embeds, **options)), "inputs_embeds"
    if config.sliding_window is None:  # assisted decoding crops the cache, which a sliding one cannot
        assert torch.equal(greedy, model.generate(ids, **options, prompt_lookup_num_tokens=2)), "prompt look-up"
        assert torch.equal(greedy, model.generate(ids, **options, assistant_model=build(config))), "assisted"
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(ids, **{**options, "do_sample": True}, use_cache=cached))
    assert torch.equal(*found), "sampling"
    full = model(ids).logits
    close(full[:, -3:], model(ids, logits_to_keep=3).logits, "logits_to_keep")


@torch.no_grad()
def eager_equals_sdpa(config):
    model, ids = build(config), tokens(length=8)
    found = model(ids).logits
    model.set_attn_implementation("eager")
    gap = (found - model(ids).logits).abs().max().item()
    assert gap < 1e-4, f"eager and SDPA: {gap:.2e}"  # transformers' eager softmax is float32


@torch.no_grad()
def left_padding_equals_single_runs(config):
    model = build(config)
    long, short = tokens(batch=1, length=10), tokens(batch=1, length=6, seed=1)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    found = model(batch, attention_mask=mask, position_ids=positions).logits
    close(found[1, 4:], model(short).logits[0], "left-padded row")
    close(found[0], model(long).logits[0], "unpadded row")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **options)
    alone = model.generate(short, attention_mask=torch.ones_like(short), **options)
    assert torch.equal(together[1, 4:], alone[0]), "left-padded generation"


@torch.no_grad()
def wiring_is_the_plans(config):
    """Readers attend with the very tensors of their sources; borrowed projections do not exist."""
    plan, model, calls = config.plan, build(config), {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(tokens(length=8))
    fields = {"queries": "query", "keys": "key", "values": "value"}
    names = {name for name, _ in model.named_parameters()}
    for state, field in fields.items():
        for layer, source in enumerate(getattr(plan, state)):
            owned = f"model.layers.{layer}.self_attn.{state[0]}_proj.weight" in names
            assert owned == (source == layer), f"layer {layer}: {state[0]}_proj exists: {owned}"
            for other in calls if source is not None else ():
                same = torch.equal(getattr(calls[layer], field), getattr(calls[other], field))
                assert same == (getattr(plan, state)[other] == source), f"layer {layer}: {state} are layer {other}'s"


@torch.no_grad()
def causal(config):
    model, ids = build(config), tokens(length=10)
    other = ids.clone()
    other[:, 6] = (other[:, 6] + 1) % VOCABULARY
    one, two = model(ids).logits, model(other).logits
    close(one[:, :6], two[:, :6], "tokens before a changed one")
    assert (one[:, 6:] - two[:, 6:]).abs().max() > 1e-6


def gradients_equal_under_checkpointing(config):
    ids, found = tokens(length=8), []
    for checkpointing in (False, True):
        model = build(config).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, plain in found[0].items():
        assert plain is not None and plain.abs().max() > 0, f"{name} does not train"
        close(plain, found[1][name], f"gradient of {name}")


def reentrant_is_refused(config):
    model = build(config)
    for enable in (model.activation_checkpointing_enable, model.gradient_checkpointing_enable):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                enable({"use_reentrant": True})
        except ValueError as error:
            assert "use_reentrant" in str(error)
        else:
            raise AssertionError("reentrant checkpointing was accepted")


def compiled_equals_eager(config, backend="aot_eager"):
    torch._dynamo.reset()
    model, ids = build(config), tokens(length=8)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        found = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
    # inductor fuses the norms, which compute in float32, and rounds there in another order
    close(plain, found, f"compiled with {backend}", 1e-5 if backend == "inductor" else TOLERANCE)


def save_and_load_are_bit_equal(config, folder):
    model, ids = build(config), tokens(length=8)
    model.save_pretrained(folder)
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert again.config.plan == config.plan and again.config.methods == config.methods
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again.eval()(ids).logits), "saved and loaded differ"


def documented(config):
    for entry in config.cross_layer:
        method = load_method(entry)
        module = inspect.getmodule(type(method))
        text = inspect.getdoc(module) or ""
        for word in ("Flows:", "Reads:", "Cache:", "Source:"):
            assert word in text, f"{method.name()}: the module's docstring lacks {word!r}"
        assert "\n\n    " in text, f"{method.name()}: the module's docstring has no equation"
        assert type(method).__doc__ and not type(method).__doc__.startswith(type(method).__name__ + "(")


CHECKS: list[Check] = [
    cached_equals_full,
    static_equals_dynamic,
    cropping_and_reordering,
    beam_search_equals_uncached,
    every_way_to_generate,
    eager_equals_sdpa,
    left_padding_equals_single_runs,
    wiring_is_the_plans,
    causal,
    gradients_equal_under_checkpointing,
    reentrant_is_refused,
    documented,
]
