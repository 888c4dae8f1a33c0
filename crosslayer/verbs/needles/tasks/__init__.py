"""Tasks for the LM Evaluation Harness: a YAML file for each length."""

from pathlib import Path

TASKS = Path(__file__).parent  # for `lm_eval --include_path`
