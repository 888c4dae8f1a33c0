"""Text: documents by domain, and the token sequences cut from them."""
