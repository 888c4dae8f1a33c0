"""Latents of a method, fitted to text, with bits for a budget of bytes."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.methods import merge_plans
from crosslayer.corpus.windows import Windows
from crosslayer.output.formatting import listed
from crosslayer.verbs.retrofit.alternatives import Compared
from crosslayer.verbs.retrofit.convert import convert, plain_decoder
from crosslayer.verbs.retrofit.latents import (
    StateMoments,
    levels_of,
    measure_moments,
    with_bits,
    with_errors,
    within_axes,
)
from crosslayer.verbs.retrofit.options import AXES, RetrofitOptions
from crosslayer.verbs.retrofit.result import Choice
from crosslayer.verbs.retrofit.search import searched_methods
from crosslayer.verbs.retrofit.strategy import Chosen, Named, Strategy


class Latents(Strategy):
    """A method whose layers cache latents: `kv_budget` chooses bits in the axes; without a budget it stays as it is."""

    needs = ("calibration",)
    passes = {"calibration": 4}  # for keys and values, then for what errors cost, each with gradients

    def __init__(self, options: RetrofitOptions, named: Sequence[Named], config: CrossLayerConfig | None = None):
        self.axes = frozenset(AXES if named else options.axes.split(","))
        (one,) = named or searched_methods("bits")
        self.method = within_axes(one() if isinstance(one, type) else one, self.axes)
        super().__init__(options, [self.method], config)

    def choose(self, model: PreTrainedModel, windows: Mapping[str, Windows]) -> Chosen:
        """Return the method, with bits for the budget if there is one, and moments to fit it by."""
        text, budget, seed = windows["calibration"].by_domain(), self.options.kv_budget, self.options.seed
        levels = levels_of(self.axes)
        moments = measure_moments(
            plain_decoder(model), text, merge_plans([self.method], model.config.num_hidden_layers), seed
        )
        rounded = convert(model, with_bits(self.method, moments, budget, levels), moments=moments, share_weights=True)
        assert isinstance(rounded.model, CrossLayerForCausalLM)
        moments = with_errors(rounded.model, moments, text, seed)
        how = "as options" if budget is None else f"bits for {budget:g} of the cache"
        return Chosen([with_bits(self.method, moments, budget, levels)], Choice(how=how), moments)

    def beside(self, model: PreTrainedModel, moments: Sequence[StateMoments] | None) -> list[Compared]:
        """Return latents of half and of twice the budget, and of the same bytes by bits alone and by rank alone.

        Those whose budget latents cannot have are left out; there are none where latents were not chosen by a budget.
        """
        budget = self.options.kv_budget
        if moments is None or budget is None:
            return []
        wanted = [(self.axes, budget / 2), (self.axes, budget * 2)]
        wanted += [(axes, budget) for axes in (frozenset({"bits"}), frozenset({"rank"})) if axes != self.axes]
        compared = []
        for axes, share in wanted:
            try:
                method = with_bits(within_axes(self.method, axes), moments, share, levels_of(axes))
            except ValueError:
                continue
            other = convert(model, method, moments=moments, share_weights=True).model
            named = [axis for axis in AXES if axis in axes]
            options = f"--kv-budget {share:g} --axes {','.join(named)}"
            compared.append(Compared(f"latents by {listed(named)}", other, options=options))
        return compared
