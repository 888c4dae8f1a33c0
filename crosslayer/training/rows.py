"""The rows of a recipe: those that are trained on, in an order that its seed determines, and held-out ones."""

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerFast

from crosslayer.models.embedded import cache_folder
from crosslayer.output.progress import progress
from crosslayer.training.instructions import ExampleRows
from crosslayer.training.mixture import FixedRows, Mixture, spread
from crosslayer.training.recipe import Recipe
from crosslayer.training.shards import Shards
from crosslayer.training.texts import DomainShards
from crosslayer.training.tokenizers import kept_tokenizer

TOKENS = "tokens"  # folder in the cache


@dataclass(frozen=True)
class Rows:
    """Tokenized text of a recipe by domain."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast
    shards: dict[str, DomainShards]

    def training(self, items: int) -> Mixture:
        """Return `items` rows to train on; fewer are the first of more."""
        texts = {name: shards.training for name, shards in self.shards.items()}
        weights = {part.name: part.weight for part in self.recipe.data.domains}
        return Mixture(texts, weights, self.recipe.data.length, self.recipe.seed, items, self._examples())

    def held_out(self) -> dict[str, Subset[dict[str, Tensor]]]:
        """Return held-out rows of each domain, spread evenly over it."""
        count = self.recipe.judge.held_out if self.recipe.stages else self.recipe.eval.windows
        rows = {}
        for part in self.recipe.data.domains:
            text, length = self.shards[part.name].validation, self.recipe.data.length
            every = FixedRows(text, length, part.name) if part.columns is None else self._packed(part.name, text)
            rows[part.name] = spread(every, count)
        return rows

    def left_out(self) -> dict[str, int]:
        """Return how many instructions of each domain are longer than a row."""
        return {name: examples.left_out for name, examples in self._examples().items()}

    def _examples(self) -> dict[str, ExampleRows]:
        names = [part.name for part in self.recipe.data.domains if part.columns is not None]
        return {name: self._packed(name, self.shards[name].training) for name in names}

    def _packed(self, name: str, text: Shards) -> ExampleRows:
        padding = self.tokenizer.pad_token_id
        padding = padding if isinstance(padding, int) else 0
        return ExampleRows(text, self.recipe.data.length, padding, name, self.recipe.objective == "response")


def recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a recipe, trained on its text if it is of byte pairs."""
    domains = [part.text() for part in recipe.data.domains]
    with progress("reading the tokenizer", 0):
        digest = "/".join(f"{domain.name}: {domain.digest()}" for domain in domains)
        return kept_tokenizer(
            recipe.tokenizer or "bytes",
            lambda: (text for domain in domains for text in domain.training()),
            cache_folder() / TOKENS,
            digest,
        )


def read_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Tokenize the text of a recipe, or read its tokens from the cache."""
    domains = [part.text(held_out_often=bool(recipe.stages)) for part in recipe.data.domains]
    folder = cache_folder() / TOKENS
    rows = Rows(recipe, tokenizer, {domain.name: domain.shards(tokenizer, folder) for domain in domains})
    rows.training(1)  # raises now what a trainer would raise later
    return rows
