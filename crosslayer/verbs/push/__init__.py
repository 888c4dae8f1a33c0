"""Uploads a model folder to the Hugging Face hub."""

GROUP = "Ship"
ARGUMENTS = 2  # folder, repository
