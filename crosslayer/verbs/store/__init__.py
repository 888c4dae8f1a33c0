"""Lists, checks and prunes a folder of stored prompts."""

GROUP = "Store"
NEEDS_TORCH = False
