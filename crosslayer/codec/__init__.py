"""Codes a finished KV cache: keys and values predicted from the decoded layers below, one step per token, ANS."""
