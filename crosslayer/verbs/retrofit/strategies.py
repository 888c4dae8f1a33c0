"""Which `Strategy` the options of a retrofit ask for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, load_methods, method_class, to_entry
from crosslayer.verbs.retrofit.choosers import Choosers
from crosslayer.verbs.retrofit.layers import Layers
from crosslayer.verbs.retrofit.options import ONE_OF, RetrofitOptions
from crosslayer.verbs.retrofit.search import LayerSearch
from crosslayer.verbs.retrofit.strategy import Given, Named, Strategy


def strategy_of(options: RetrofitOptions, config: CrossLayerConfig | None = None) -> Strategy:
    """Return how methods and layers are chosen: a budget chooses what the method, or any method, lets it search.

    Args:
        options: what the user asked for.
        config: the model's, as of a crosslayer decoder; None: not known, as for a report that was read.
    """
    named = _named(options.method)
    names, spaces = " and ".join(one.name() for one in named), {one.search_space() for one in named}
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


def strategies_of(
    options: RetrofitOptions, config: CrossLayerConfig, defaults: Mapping[str, Any]
) -> dict[str, Strategy]:
    """Return the strategy of each variant of a sweep, after all checks that need neither text nor weights."""
    strategies = {name: strategy_of(each, config) for name, each in options.variants().items()}
    for strategy in strategies.values():
        strategy.check(strategy.options.changed(defaults))
    return strategies


def plain_method(method: Entry | Sequence[Entry] | None) -> str | dict[str, Any] | list[dict[str, Any]] | None:
    """Return a method, or several, as plain data, as options hold it; of a class its name."""
    if isinstance(method, Sequence) and not isinstance(method, str):
        return [to_entry(one) for one in load_methods(method)]
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
        except json.JSONDecodeError as error:
            raise ValueError(f"`method` must be a name, a JSON object or a list, got {value!r} ({error})") from None
        except RecursionError:
            raise ValueError("`method` must be a name or a JSON object, got JSON that is nested too deeply") from None
    cls = method_class(value)
    takes_groups = cls.from_groups.__func__ is not Method.from_groups.__func__  # type: ignore[attr-defined]
    return [cls] if takes_groups else [*load_methods(value)]
