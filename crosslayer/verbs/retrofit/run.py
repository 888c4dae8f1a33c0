"""A whole retrofit: choose layers, convert, calibrate, measure the damage, and return a report."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, load_methods, method_class, method_names, to_entry
from crosslayer.corpus.domains import DomainTexts
from crosslayer.models.load import load_config, public_name, ready_model
from crosslayer.output.progress import progress
from crosslayer.probe.model import check_ids, evaluating, unwrapped
from crosslayer.verbs.retrofit.choosers import Choosers
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.moments import REFITS
from crosslayer.verbs.retrofit.options import ONE_OF, RetrofitOptions
from crosslayer.verbs.retrofit.original import Original, Seconds
from crosslayer.verbs.retrofit.report import Variant, announce_time, report_of
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.retrofit.search import LayerSearch
from crosslayer.verbs.retrofit.strategy import Given, Layers, Named, Strategy
from crosslayer.verbs.retrofit.texts import RetrofitTexts


def retrofit(
    model: PreTrainedModel | str | Path,
    text: DomainTexts = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: Entry | Sequence[Entry] | None = None,
    layers: str = "top-half",
    size: int | None = None,
    count: int | None = None,
    kv_budget: float | None = None,
    kv_context: int | None = None,
    kl_budget: float | None = None,
    read_budget: float | None = None,
    compensation: str | None = None,
    target: str | None = None,
    groups: int | None = None,
    part: str | None = None,
    calibration_text: DomainTexts = None,
    windows: int = 96,
    calibration: int = 128,
    length: int = 512,
    quick: bool = False,
    full: bool = False,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    sweep: Sequence[str] = (),
) -> RetrofitReport:
    """Share or remove layers of a pretrained model, compensate for that, and report memory saved and quality lost.

    Args:
        model: Hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model, which is not changed.
        text: evaluation text, repeatable: one domain each, named by NAME=FILE, or NAME=DATASET,config=…,split=…,
            column=…; default: all embedded domains. In Python also token ids (N, `length`), documents, sources, or a
            dict of these by domain.
        tokenizer: in Python, the tokenizer of a loaded model.
        method: a method (`crosslayer methods` lists them) or your own module, applied to --layers; or a method with
            all its options as JSON: {"name": NAME, OPTION: VALUE}, or a list of these.
        layers: layers to convert (0-based): groups such as 18-21,22-25 or 18+20,19+21; top-half: blocks of `size`
            layers; auto: chosen by similarity on text; or auto:top-half-similarity: only in the upper half.
        size: layers of a block, for top-half; default: 4.
        count: how many layers become readers or are dropped, for top-half and auto; default: as many as the top half
            has in blocks of 4, or of `size`.
        kv_budget: instead of --method: search for the methods and layers that keep this share of the KV cache (0 to 1).
        kv_context: context length at which the cache is counted; default: 2048, or twice the largest sliding window.
        kl_budget: instead of --method: search for the smallest cache within this KL to the original, in nats/token.
            With a method whose layers choose tokens: search which layers choose for which, for the fewest reads.
        read_budget: instead of --method: search which layers choose tokens for which, so that a decoding step reads
            this share of the cached bytes (0 to 1). The cache keeps its size.
        compensation: how to compensate for the change. A linear map W_c of each converted layer's input is fitted by
            layerwise (default), ridge, mean or lstsq; zero leaves it at zero. refit (default if layers read another
            layer's states) fits W_c and W_o together, refit-o only W_o; none fits nothing.
        target: where W_c's output is added: attention (default if possible), heads, mlp, or heads-from-values (a map
            of the output of W_v).
        groups: groups of windows for `compensation` mean, each with its own mean (v of Theorem 3.1); default: 1.
        part: what to remove, if the method offers a choice: attention, mlp or layer.
        calibration_text: text to fit and search on, repeatable; default: --text, or embedded books, web and docs.
        windows: evaluation windows, all domains together; at least 16 per domain.
        calibration: calibration windows, all domains together.
        length: tokens per window.
        quick: a first estimate in a fraction of the time: the fewest windows, of 128 tokens each, and a shorter search.
        full: also measure quantized caches of both models (float8, 8 and 4 bits), and time a decoding step of both
            after `kv_context` tokens, at most 8,192. If layers choose tokens, also run the needle test at up to
            8,192 tokens.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: dtype for computing, not for saving; default: float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name.
        sweep: KEY=VALUE,VALUE, repeatable: convert with every combination of values of method, layers, size, count,
            compensation, target or groups. Writes a table of the damage, but no model.

    Raises:
        ValueError: options contradict each other, the model or the configuration is not supported, or there is too
            little text.
    """
    options = options_of(
        method=plain_method(method),
        layers=layers,
        size=size,
        count=count,
        kv_budget=kv_budget,
        kv_context=kv_context,
        kl_budget=kl_budget,
        read_budget=read_budget,
        compensation=compensation,
        target=target,
        groups=groups,
        part=part,
        windows=windows,
        calibration=calibration,
        length=length,
        quick=quick,
        full=full,
        seed=seed,
        bos=bos,
        sweep=sweep,
    )
    source = unwrapped(model)
    config = source.config if isinstance(source, PreTrainedModel) else load_config(str(source))
    decoder = to_config(config)  # raises for a model that cannot be converted
    strategies = {name: strategy_of(variant, decoder) for name, variant in options.variants().items()}
    for strategy in strategies.values():  # raises for all that is wrong without text and weights
        strategy.check(strategy.options.changed(DEFAULTS))
    with progress("reading the text", 0):
        texts = RetrofitTexts.load(text, calibration_text, seed)
    strategies = sized_strategies(strategies, texts, decoder)
    original = _original(source, config, tokenizer, texts, strategies, dtype=dtype, device=device)
    with evaluating(original.model):
        announce_time(original, [*strategies.values()])
        variants = {name: _variant(original, strategy) for name, strategy in strategies.items()}
        return report_of(original, variants, texts)


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(retrofit).parameters.items()}


def options_of(**given: Any) -> RetrofitOptions:
    """Return the options of a retrofit; those that are not given are at their default."""
    return RetrofitOptions(**{name: DEFAULTS[name] for name in RetrofitOptions.model_fields} | given)


def sized_strategies(
    strategies: Mapping[str, Strategy], texts: RetrofitTexts, config: CrossLayerConfig
) -> dict[str, Strategy]:
    """Return the strategies with as many windows as they use: with `quick`, the fewest that this text allows.

    Raises:
        ValueError: there are fewer windows than a fit or a measurement needs, or the text has another length.
    """
    sized = {}
    for name, strategy in strategies.items():
        sized[name] = strategy_of(texts.checked_options(strategy, DEFAULTS), config)
    texts.window_counts(*sized.values())
    return sized


def strategy_of(options: RetrofitOptions, config: CrossLayerConfig | None = None) -> Strategy:
    """Return how methods and layers are chosen: a budget chooses what the method, or any method, lets it search.

    `config` is the model's, as of a crosslayer decoder; None: not known.
    """
    named = _named(options.method)
    names = " and ".join(method.name() for method in named)
    spaces = {method.search_space() for method in named}
    if len(named) > 1 and "choosers" in spaces:
        raise ValueError(f"`method` must be one method if layers choose tokens, got {names}")
    has_budget = options.kl_budget is not None or options.read_budget is not None
    if has_budget and ("choosers" in spaces or not named and options.read_budget is not None):
        way: type[Strategy] = Choosers
    elif not named:
        way = LayerSearch
    elif has_budget:
        raise ValueError(ONE_OF)
    elif options.kv_budget is not None:
        raise ValueError(f"`kv_budget` chooses methods and layers itself; remove it, or `method` {names}")
    else:
        way = Layers if isinstance(named[0], type) else Given
    return way(options, named, config)


def plain_method(method: Entry | Sequence[Entry] | None) -> str | dict[str, Any] | list[dict[str, Any]] | None:
    """Return a method, or several, as plain data, as options hold it; of a class its name."""
    if isinstance(method, Sequence) and not isinstance(method, str):
        return [to_entry(loaded) for loaded in load_methods(method)]
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method


def _named(value: str | dict[str, Any] | list[dict[str, Any]] | None) -> list[Named]:
    """Return whole methods, or the class of a method whose layers are to be chosen."""
    if value is None:
        return []
    if not isinstance(value, str):
        return [*load_methods(value)]
    if value.lstrip().startswith(("{", "[")):
        try:
            return [*load_methods(json.loads(value))]
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"`method` must be a name, a JSON object or a list, got {value[:80]!r} ({error})"
            ) from None
    cls = method_class(value)
    if cls.takes_groups():
        return [cls]
    # A method without groups that is listed needs training; a user's own may adapt weights in `inherit`.
    if value in method_names():
        known = [name for name in method_names() if method_class(name).takes_groups()]
        names = f"{', '.join(known)}, or options as JSON"
        raise ValueError(f"`method` must be one of {names}, got {value!r}; crosslayer train has the others")
    return [*load_methods(value)]


def _original(
    source: PreTrainedModel | str | Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: RetrofitTexts,
    strategies: Mapping[str, Strategy],
    **loading: Any,
) -> Original:
    """Load the weights and cut the windows that the strategies need."""
    model, tokenizer = ready_model(source, tokenizer, **loading)
    seconds = Seconds()
    with seconds.timed("read"), progress("tokenizing the text", 0):
        windows = texts.windows(tokenizer, *strategies.values())
    for cut in windows.values():
        check_ids(model, cut.ids)
    is_loaded = isinstance(source, PreTrainedModel)
    # as the files have the weights, where that is narrower than what they are computed in
    dtype = model.dtype
    if not is_loaded and isinstance(config.dtype, torch.dtype) and config.dtype.itemsize < dtype.itemsize:
        dtype = config.dtype
    return Original(
        model,
        windows,
        tokenizer,
        name=public_name(source),
        dtype=dtype,
        seed=next(iter(strategies.values())).options.seed,
        is_kept=is_loaded,
        seconds=seconds,
    )


def _variant(original: Original, strategy: Strategy) -> Variant:
    """Choose layers, convert and fit; the weights are rounded to the dtype in which they will be saved."""
    with original.seconds.timed("choose"):
        methods, choice = strategy.choose(original)
    fit = strategy.fit
    # after a search there may be no W_o to refit
    if fit in REFITS and not any(method.grouped for method in methods):
        fit = "layerwise" if strategy.adds else "none"
    with original.seconds.timed("convert"):
        converted = convert(
            original.model,
            methods,
            calibration=strategy.calibration(original.windows) or None,
            fit=None if fit == "none" else fit,
            groups=strategy.options.groups or 1,
            share_weights=not original.is_kept or bool(strategy.options.sweep),
        )
        for weight in converted.model.parameters():
            rounded = weight.data.to(original.dtype).to(weight.dtype)
            # weights that rounding leaves as they are may share memory with the original
            if not torch.equal(rounded, weight.data):
                weight.data = rounded
    return Variant(strategy, methods, choice, converted)
