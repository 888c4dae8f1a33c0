"""Tasks of the LM Evaluation Harness: a YAML file for each length."""

from pathlib import Path

TASKS = Path(__file__).parent  # what `lm_eval --include_path` takes
