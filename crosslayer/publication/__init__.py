"""A model's folder on the Hugging Face hub."""
