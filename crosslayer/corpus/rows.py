"""Rows of tables, which are untrusted: their text, or an instruction with its response.

The prompt is that of arXiv 2502.00439 (appendix B).
"""

from collections.abc import Mapping
from typing import Any

PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:"
)
TEXT, MESSAGES, INSTRUCTION, RESPONSES = "text", "messages", "instruction", ("response", "output")  # usual columns
Example = tuple[str, str]  # prompt, response


def row_text(row: Any, location: str, column: str) -> str | None:
    """Return the text in a column of a row, None where it is null."""
    if not isinstance(row, dict) or column not in row:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{location}: no text in column {column!r}, got {keys}")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{location}: no text in column {column!r}; it holds a value of type {type(text).__name__}")
    # JSON can write half of a surrogate pair, which no tokenizer encodes: an error here still knows the row
    if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{location}: column {column!r} holds half of a character (a surrogate)")
    return text


def is_chosen(row: Any, location: str, where: Mapping[str, Any]) -> bool:
    """Return whether a row has all values of `where`, by column; a dot leads into a column that holds an object."""
    for column, wanted in where.items():
        value = row
        for name in column.split("."):
            if not isinstance(value, dict) or name not in value:
                keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise ValueError(f"{location}: no column {column!r} for `where`; at {name!r} it has {keys}")
            value = value[name]
        if value != wanted:
            return False
    return True


def example_of(
    row: Any,
    location: str,
    instruction: str = INSTRUCTION,
    input: str | None = None,
    choices: str | None = None,
    response: str = RESPONSES[0],
    messages: str | None = None,
) -> Example | None:
    """Return prompt and response of a row, whose columns are named; None if it has no response, or several.

    With `messages`, the row is a conversation; a system message precedes the instruction.
    """
    if messages is not None:
        held = row.get(messages) if isinstance(row, dict) else None
        if not isinstance(held, list) or not all(isinstance(message, dict) for message in held):
            raise ValueError(f"{location}: column {messages!r} has no list of messages, each with role and content")
        turns = [(row_text(message, location, "role"), row_text(message, location, "content")) for message in held]
        roles = [role for role, _ in turns]
        contents = [content or "" for _, content in turns]
        # a conversation of several turns has several responses; such rows are counted as skipped
        if roles not in (["user", "assistant"], ["system", "user", "assistant"]) or not contents[-1].strip():
            return None
        return PROMPT.format(instruction="\n\n".join(contents[:-1]), input=""), contents[-1]

    answer = row_text(row, location, response)
    if answer is None or not answer.strip():
        return None
    asked = row_text(row, location, instruction) or ""
    lines = [] if input is None else [row_text(row, location, input) or ""]
    if choices is not None:
        options = row.get(choices)
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            raise ValueError(f"{location}: column {choices!r} has no list of texts; the columns are {', '.join(row)}")
        lines += [f"- {option}" for option in options]
    return PROMPT.format(instruction=asked, input="\n".join(filter(None, lines))), answer


def document_of(row: Any, location: str, column: str) -> str | None:
    """Return the text of a row; None if the row has no text.

    A row without `column` "text", but with the usual columns of instructions, gives its prompt and response.
    """
    if column != TEXT or not isinstance(row, dict) or TEXT in row:
        return row_text(row, location, column)
    # tables of instructions are calibration text as they are, without an option that names their columns
    response = next((name for name in RESPONSES if name in row), None)
    if MESSAGES in row:
        example = example_of(row, location, messages=MESSAGES)
    elif INSTRUCTION in row and response is not None:
        example = example_of(row, location, response=response, input="input" if "input" in row else None)
    else:
        return row_text(row, location, column)
    return None if example is None else "".join(example)
