"""Train a model by a recipe: weights, data, steps, checkpoints."""
