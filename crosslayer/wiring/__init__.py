"""Who stores and who reads in any model, from its config alone."""
