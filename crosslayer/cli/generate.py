"""`crosslayer generate`."""

from functools import partial
from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, Device, Dtype, Seed, importing, print_headline
from crosslayer.output.progress import Progress


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Put the prompt into the chat template.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Continue a prompt, token by token."""
    with importing():
        from crosslayer.generation.run import generate

    continuation = generate(
        model,
        prompt,
        new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        dtype=dtype,
        device=device,
        write=partial(print, end="", flush=True),
        progress=Progress,
    )
    print()
    print_headline(continuation.headline())
