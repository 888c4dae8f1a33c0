"""The contract itself is tested: six bugs that shipped elsewhere, planted here, must each make it fail."""

import contextlib
import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch

from crosslayer import testing as contract
from crosslayer.core.checkpointing import NewPreTrainedModel
from crosslayer.core.decoder import attention, modeling
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.method import HeadMixer, Method
from crosslayer.core.plan import DepthPlan
from crosslayer.core.sources import SharedStates
from crosslayer.core.transformers_versions import CACHE, takes_cache

UNIATTN = [{"name": "uniattn", "superblocks": ((1, 2, 3), (4, 5))}]
CLA = [{"name": "cla", "group": 2, "start": 1, "end": 5}]


def values_slot(monkeypatch):
    """A layer that stores values alone puts them in the values slot."""

    def cached(self, states, cache):
        q, k, v = states
        if len(self.stored) == 2:
            return [q, *cache.update(k, v, self.layer_idx)]
        return [q, None, cache.update(v[..., :0], v, self.layer_idx)[1]]

    monkeypatch.setattr(attention.CrossLayerAttention, "_cached", cached)


def mutated_carry(monkeypatch):
    """Layers write into one carry, where each source overwrites the last one's states."""
    plain = inspect.unwrap(modeling.CrossLayerDecoderLayer.forward)

    class Mutating(modeling.CrossLayerDecoderLayer):
        @takes_cache
        def forward(self, stream, carry, *args, **kwargs):
            stream, new = plain(self, stream, carry, *args, **kwargs)
            carry.update(new)
            return stream, carry

    monkeypatch.setattr(modeling, "CrossLayerDecoderLayer", Mutating)


def no_mask(monkeypatch):
    """No mask function is registered, so that every layer gets None."""
    monkeypatch.setattr(modeling, "masks_of", lambda *args: dict.fromkeys(modeling.MASKS))


def reentrant(monkeypatch):
    """Reentrant checkpointing is let through."""

    def enable(self, options=None, *args, **kwargs):
        NewPreTrainedModel.activation_checkpointing_enable(self, {"use_reentrant": True})

    monkeypatch.setattr(modeling.CrossLayerPreTrainedModel, "activation_checkpointing_enable", enable)


def off_by_one(monkeypatch):
    """The model is built with sources one layer too low."""
    true, building = CrossLayerConfig.wiring.fget, []

    def wiring(self):
        right = true(self)
        if not building:
            return right
        plan = right.plan
        shifted = tuple(max(0, source - 1) if source != layer else layer for layer, source in enumerate(plan.keys))
        shifted = tuple(source if shifted[source] == source else shifted[source] for source in shifted)
        return dataclasses.replace(right, plan=DepthPlan(plan.queries, shifted, shifted, plan.mlps))

    init = modeling.CrossLayerForCausalLM.__init__

    def build(self, config):
        building.append(True)
        with contextlib.ExitStack() as stack:
            stack.callback(building.clear)
            init(self, config)

    monkeypatch.setattr(CrossLayerConfig, "wiring", property(wiring))
    monkeypatch.setattr(modeling.CrossLayerForCausalLM, "__init__", build)


def through_the_cache(monkeypatch):
    """Readers find the source's states only where there is a cache."""
    plain = attention.CrossLayerAttention.forward

    def forward(self, hidden_states, carry, **kwargs):
        if kwargs[CACHE] is None:
            shared = [name for names in self.sources.values() for name in names]
            states = carry.get(attention.SHARED, SharedStates({}))
            known = {name: states[name] for name in shared if states[name] is not None}  # not maps that are not built
            states = states.updated({name: torch.zeros_like(state) for name, state in known.items()})
            carry = {**carry, attention.SHARED: states}
        return plain(self, hidden_states, carry, **kwargs)

    monkeypatch.setattr(attention.CrossLayerAttention, "forward", forward)


BUGS = {
    values_slot: (UNIATTN, contract.beam_search_equals_uncached),
    mutated_carry: (UNIATTN, contract.gradients_equal_under_checkpointing),
    no_mask: (UNIATTN, contract.left_padding_equals_single_runs),
    reentrant: (UNIATTN, contract.reentrant_is_refused),
    off_by_one: (CLA, contract.wiring_matches_the_plan),
    through_the_cache: (UNIATTN, contract.cached_equals_full),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_planted_bug_is_found(bug, monkeypatch):
    methods, check = BUGS[bug]
    config = contract.config_of(methods)
    check(config)  # right before the bug
    bug(monkeypatch)
    with pytest.raises((AssertionError, torch.utils.checkpoint.CheckpointError)):
        check(config)


@dataclass(frozen=True)
class Foresight(Method):
    """Values that know the mean of all tokens."""

    def heads(self, config, wiring, layer):
        return Mean()


class Mean(HeadMixer):
    def before(self, q, k, v, carry):
        return q, k, v + v.mean(2, keepdim=True), carry


def test_what_fails_is_named_with_how_much_it_differs():
    contract.check_method(["cla", {"name": "drop", "mlp": (2,)}], num_hidden_layers=4)
    with pytest.raises(AssertionError, match=r"^cached_equals_full:.*\[1, 1,.*1e-10"):
        contract.check_method(Foresight)
    with pytest.raises(AssertionError, match="^tokens before"):
        contract.causal(contract.config_of(Foresight()))
    with pytest.raises(AssertionError, match="^layers.*values"):
        contract.combines_with_shared_states(contract.config_of(Foresight()))
    with pytest.raises(AssertionError, match="'Flows:'"):
        contract.documented(contract.config_of(Foresight()))
