"""`crosslayer generate`."""

from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, Device, Dtype, Seed, importing, print_headline, public_name
from crosslayer.output.progress import say


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
        from crosslayer.generation.run import Sampling
        from crosslayer.generation.run import generate as run
        from crosslayer.models.load import load_model

    sampling = Sampling(max_new_tokens, temperature, seed)
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text to continue")
    say(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    say("generating")
    found = run(loaded, tokenizer, prompt, sampling=sampling, chat=chat)
    print_headline({"model": public_name(model), **found})
