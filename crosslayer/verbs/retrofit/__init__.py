"""Converts a pretrained model to share or leave out attention, and measures what that costs."""

GROUP = "Convert"
OUT = ""
PANELS = {
    "Options": ("method", "layers", "size", "count", "kv_budget", "text", "quick", "out"),
    "Choice and compensation": (
        *("kl_budget", "read_budget", "kv_context", "part"),
        *("compensation", "target", "groups", "sweep"),
    ),
    "Text": ("calibration_text", "windows", "calibration", "length", "bos", "seed"),
    "Run and output": (
        *("full", "heal", "force", "dtype", "device"),
        *("allow_methods", "json", "debug"),
    ),
}
NEXT = "crosslayer verify {out}"
