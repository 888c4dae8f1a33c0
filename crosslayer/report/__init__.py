"""Records of results and the pages that show them."""
