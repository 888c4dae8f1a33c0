"""Run a model and measure it: what it computes, what it costs."""
