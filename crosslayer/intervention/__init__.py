"""Change what attention sees, and measure what follows."""
