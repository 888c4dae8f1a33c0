"""What a model of ours is and does."""
