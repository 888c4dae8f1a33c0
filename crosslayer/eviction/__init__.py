"""KV cache eviction: which cached tokens are dropped, when, and how a model runs meanwhile."""
