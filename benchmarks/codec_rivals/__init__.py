"""What `benchmarks/codecs.py` measures: the codec without each of its parts, and other ways to store a cache."""
