"""How long a model should take, from what it computes and reads and from what the machine does in the same run.

prefill       = FLOPs of the matrices / their rate + FLOPs of attention / its rate + head / read rate + operators
another token = weights / read rate + states read / their rate + states copied / copy rate + operators
"""

from dataclasses import dataclass

from crosslayer.output.record import Frozen
from crosslayer.verbs.bench.costs import Structure


class Rates(Frozen):
    """What a machine does: FLOP/s of matrices and attention, bytes/s of weights, states, copies; seconds an operator.

    On an asynchronous device the operators are launched while it computes, so that the longer of the two counts.
    """

    matrices: float
    attention: float
    weights: float
    states: float
    copies: float
    operator: float
    asynchronous: bool = False

    def seconds(self, work: float, operators: int) -> float:
        """Return the time of `work` seconds of the device beside the fixed cost of `operators`."""
        fixed = operators * self.operator
        return max(work, fixed) if self.asynchronous else work + fixed

    def by_name(self) -> dict[str, float]:
        """Return the numbers by their names."""
        return self.model_dump(exclude={"asynchronous"})


class Operators(Frozen):
    """How many operators a decoding step runs with each cache, whatever the length."""

    dynamic: int
    static: int


class Prediction(Frozen):
    """Seconds that a measure should take, and its terms in seconds: the device's work, and the cost of operators."""

    seconds: float
    work: dict[str, float]
    operators: float

    @property
    def operator_share(self) -> float:
        """The share of operators, a rough term, in the whole."""
        return self.operators / self.seconds


@dataclass(frozen=True)
class Load:
    """A setting: B sequences of `context` tokens, then `new_tokens` decoded step by step."""

    context: int
    batch: int
    new_tokens: int

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


def predict(model: Structure, rates: Rates, load: Load, operators: Operators) -> dict[str, Prediction]:
    """Return what the first token and each further token should take, with a dynamic and a static cache, by measure.

    With a dynamic cache the states are as many as halfway through decoding; a static cache is read whole from the
    beginning.
    """
    matrices, attention = model.prefill_flops(load.batch, load.context)
    weights = model.weight_bytes() / rates.weights
    halfway = load.context + (load.new_tokens + 1) // 2
    prefill = {
        "matrices": matrices / rates.matrices,
        "attention": attention / rates.attention,
        "head": model.head * model.itemsize / rates.weights,
    }
    dynamic = {
        "weights": weights,
        "states": model.state_bytes(load.batch, halfway) / rates.states,
        "copies": model.copied_bytes(load.batch, halfway) / rates.copies,
    }
    static = {"weights": weights, "states": model.state_bytes(load.batch, load.total) / rates.states}
    predictions = {}
    for measure, work, count in (
        ("ttft", prefill, operators.dynamic),
        ("tpot_dynamic", dynamic, operators.dynamic),
        ("tpot_static", static, operators.static),
    ):
        seconds = rates.seconds(sum(work.values()), count)
        predictions[measure] = Prediction(seconds=seconds, work=work, operators=count * rates.operator)
    return predictions
