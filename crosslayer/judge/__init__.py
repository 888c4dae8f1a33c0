"""One comparison of candidates with the original: the same windows, questions and clock for all."""
