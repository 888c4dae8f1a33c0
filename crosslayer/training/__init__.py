"""Training by a recipe, as `train`, `heal` and `compare` do it: text, stages, trainer, checkpoints and records."""
