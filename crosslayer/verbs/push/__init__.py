"""A model's folder on the Hugging Face hub."""

GROUP = "Ship"
ARGUMENTS = 2  # folder, repository
