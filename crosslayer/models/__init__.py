"""A model and its tokenizer from a name: a folder, the hub, or a package."""
