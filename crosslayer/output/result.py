"""The base class of results: a record, a folder with a page, a display in notebooks."""

import contextlib
import html
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crosslayer import _start
from crosslayer.environment import Environment, environment
from crosslayer.output.chart import save_svg
from crosslayer.output.folder import whole_folder
from crosslayer.output.formatting import Shown, Table
from crosslayer.output.page import Page
from crosslayer.output.record import dumps, read_record, validation_message

NOTEBOOK_HEIGHT = 800  # pixels of the page inside a notebook's cell


class Result(Shown, BaseModel):
    """The result of a verb: immutable, its fields are those of `record.json`, checked on construction.

    Two results are equal if their records are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    command: str | None = Field(default_factory=lambda: _start.command_line, description="as typed; None from Python")
    typed: dict[str, str] | None = Field(
        default_factory=lambda: _start.typed, description="model and out as typed, for the next command"
    )
    environment: Environment = Field(default_factory=environment)

    def record(self) -> dict[str, Any]:
        """Return all fields as plain data, as in `record.json`."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Build a result from its record.

        Raises:
            ValueError: the record has another version, or (a `pydantic.ValidationError`) is not valid.
        """
        schema, readable = str(record.get("schema")), cls.model_fields["schema_"].default
        if schema != readable:
            raise ValueError(f"the record has the schema {schema[:60]!r}; this release reads {readable}")
        for name in ("command", "environment"):  # their defaults describe a new result
            if name not in record:
                raise ValueError(f"{name}: it is missing")
        return cls.model_validate({"typed": None, **record})  # a default would be that of the running command

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.record() == other.record()

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={value!r}" for name, value in self.headline().items())
        return f"{type(self).__name__}({figures})"

    __str__ = __repr__

    def layout(self) -> Page:
        """Return the content of the page, from `layout` of the verb's `page.py`."""
        return self.sibling("page").layout(self)

    def tables(self) -> Sequence[Table]:
        """Return the tables of the verb's `page.py` that are also printed."""
        page = self.sibling("page")
        return page.tables(self) if hasattr(page, "tables") else ()

    def sentences(self) -> list[str]:
        """Return the findings in sentences, from `sentences` of the verb's `page.py`."""
        return self.sibling("page").sentences(self)

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return `NEXT` of the verb's folder for a model and a folder, or for those that were typed, if any."""
        text = getattr(import_module(type(self).__module__.rpartition(".")[0]), "NEXT", "")
        typed = self.typed or {}
        model, out = model or typed.get("model"), out or typed.get("out")
        lone = not model or model.endswith((".json", ".gguf", "-"))  # no model that can be loaded
        if self.exit_status or ("{model}" in text and lone) or ("{out}" in text and not out):
            return None
        return text.format(model=shlex.quote(model or ""), out=shlex.quote(out or "")) or None

    @classmethod
    def sibling(cls, name: str) -> Any:
        """Import and return another module of the verb, late, since such modules import the class of the result."""
        return import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")

    def page(self) -> str:
        """Return the page as a self-contained HTML document."""
        return self._html(self.layout())

    def _html(self, layout: Page) -> str:
        # the last table: the command, the verb's `settings`, seconds, versions and the machine
        record = self.model_dump(mode="json", include={"command", "settings", "seconds", "environment"})
        settings, seconds = record.get("settings"), record.get("seconds")
        details = {"command": record["command"], **(settings if isinstance(settings, dict) else {})}
        details["seconds"] = f"{seconds:.1f}" if isinstance(seconds, float) else seconds
        details |= record["environment"]["versions"] | record["environment"]["machine"]
        cells = [[name, _written(value)] for name, value in details.items() if value not in (None, [], "")]
        tables = [*layout.tables, ("Run details", ["item", "value"], cells)]

        sentences = self.sentences() if layout.sentences is None else layout.sentences
        lead = self.tables() if layout.lead is None else layout.lead
        return replace(layout, sentences=sentences, lead=lead, tables=tables, following=self.next_command()).html()

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write record.json, report.html and an SVG for each figure; return the page's path.

        Raises:
            ValueError: the folder exists and `force` is not set, or it cannot be written.
        """
        target = Path(folder)
        with whole_folder(target, force) as partial:
            self.write_files(partial)
        return target / "report.html"

    def save_within(self, folder: Path) -> None:
        """Write page, figures and record into a folder with other files; the record is last, as a mark of completeness.

        The caller holds the folder's lock.
        """
        earlier: set[str] = set()
        with contextlib.suppress(ValueError):  # a record that cannot be read tells nothing of its figures
            panels = self.from_record(read_record(folder)).layout().panels
            earlier = {f"{panel.key}.svg" for panel in panels}
        partial = folder / ".page"
        shutil.rmtree(partial, ignore_errors=True)
        self.save(partial)
        written = sorted(partial.glob("figures/*"))
        if written:
            (folder / "figures").mkdir(exist_ok=True)
        for path in (folder / "figures").glob("*.svg"):
            if path.name in earlier:
                path.unlink()
        for path in (*written, partial / "report.html", partial / "record.json"):
            path.replace(folder / path.relative_to(partial))
        shutil.rmtree(partial)

    def write_files(self, folder: Path) -> None:
        """Write the files of a result into a folder; a class with files of its own adds them."""
        layout = self.layout()
        (folder / "report.html").write_text(self._html(layout), encoding="utf-8")
        (folder / "record.json").write_text(dumps(self.record()), encoding="utf-8")
        for panel in layout.panels:
            (folder / "figures").mkdir(exist_ok=True)
            save_svg(panel, folder / "figures")

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame, so that the styles of both do not mix."""
        content = html.escape(self.page(), quote=True)
        return f"<iframe srcdoc='{content}' style='width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0'></iframe>"


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_written(one)}" for name, one in value.items())
    return ", ".join(map(_written, value)) if isinstance(value, list) else str(value)


AnyResult = TypeVar("AnyResult", bound=Result)


def load_as(kinds: Sequence[type[AnyResult]], folder: Path) -> AnyResult:
    """Load the result in a folder; its record's schema decides which of `kinds` it is.

    Raises:
        ValueError: there is no record, it is damaged, or no type reads its schema.
    """
    record = read_record(folder)
    schema = str(record.get("schema"))
    known = {kind.model_fields["schema_"].default: kind for kind in kinds}
    if schema not in known:
        verb = schema.rpartition("/")[0]
        readable = [name for name in known if name.rpartition("/")[0] == verb] or sorted(known)
        raise ValueError(f"record.json has the schema {schema[:60]!r}; this release reads {', '.join(readable)}")
    try:
        return known[schema].from_record(record)
    except ValueError as error:
        message = validation_message(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"record.json: {message}") from None
