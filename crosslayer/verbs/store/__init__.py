"""Lists, checks and prunes a folder of stored prompts."""

GROUP = "Ship"
NEEDS_TORCH = False
