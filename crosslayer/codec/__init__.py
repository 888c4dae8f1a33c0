"""Codes a finished KV cache: keys and values predicted from the decoded layer below, one step per token, ANS."""
