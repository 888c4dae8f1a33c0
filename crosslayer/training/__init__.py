"""Training from a recipe: text, shards, schedules, checkpoints and records that `train`, `heal` and `compare` share."""
