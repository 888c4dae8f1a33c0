"""What every result can do: give its record, save a folder with a page, show that page in a notebook."""

import html
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crosslayer.environment import Environment, environment
from crosslayer.output.folder import whole_folder
from crosslayer.output.page import Page, save_page
from crosslayer.output.record import fault_of, read_record, typed_command
from crosslayer.output.shown import Shown, Table

NOTEBOOK_HEIGHT = 800  # pixels of the page inside a notebook's cell


class Result(Shown, BaseModel):
    """The result of a verb: its fields are what `record.json` holds, checked on construction, and frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    command: str | None = typed_command()
    environment: Environment = Field(default_factory=environment)

    def record(self) -> dict[str, Any]:
        """Return everything as plain data, exactly what `record.json` holds."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Build a result from its record.

        Raises:
            ValueError: the record is of another version, or (as a `pydantic.ValidationError`) does not fit.

        """
        schema, readable = str(record.get("schema")), cls.model_fields["schema_"].default
        if schema != readable:
            raise ValueError(f"the record is {schema[:60]!r}; this release reads {readable}")
        for name in ("command", "environment"):  # they have defaults, which are about a result that is made now
            if name not in record:
                raise ValueError(f"{name}: it is missing")
        return cls.model_validate(record)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={value!r}" for name, value in self.headline().items())
        return f"{type(self).__name__}({figures})"

    __str__ = __repr__

    def layout(self) -> Page:
        """Return the parts of the page: what `layout` of the verb's `page.py` makes of the result."""
        return self.sibling("page").layout(self)

    def tables(self) -> Sequence[Table]:
        """Return the tables of the verb's `page.py` that a terminal shows too."""
        page = self.sibling("page")
        return page.tables(self) if hasattr(page, "tables") else ()

    def sentences(self) -> list[str]:
        """Return what was found, in the sentences that `page.py` has, or takes from `words.py`."""
        return self.sibling("page").sentences(self)

    @classmethod
    def sibling(cls, name: str) -> Any:
        """Return a module of the verb: what tells of a result imports its class, which imports none of that."""
        return import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")

    def made_with(self) -> Table:
        """Return what the page ends with: the command, the verb's `settings`, seconds, versions and the machine."""
        record = self.model_dump(mode="json", include={"command", "settings", "seconds", "environment"})
        settings, seconds = record.get("settings"), record.get("seconds")
        rows = {"command": record["command"], **(settings if isinstance(settings, dict) else {})}
        rows["seconds"] = f"{seconds:.1f}" if isinstance(seconds, float) else seconds
        rows |= record["environment"]["versions"] | record["environment"]["machine"]
        cells = [[name, _written(value)] for name, value in rows.items() if value not in (None, [], "")]
        return "Made with", ["setting", "value"], cells

    def page(self) -> str:
        """Return the page as a self-contained HTML document."""
        return self._html(self.layout())

    def _html(self, layout: Page) -> str:
        return replace(layout, tables=[*layout.tables, self.made_with()]).html()

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write record.json, report.html and an SVG for each figure; return the page's path.

        Raises:
            ValueError: the folder exists and `force` is not set, or it cannot be written.

        """
        target = Path(folder)
        with whole_folder(target, force) as partial:
            self._write(partial)
        return target / "report.html"

    def save_within(self, folder: Path) -> None:
        """Put page, figures and record into a folder that holds more; the record, whose presence says whole, is last.

        The caller holds the folder's lock.
        """
        partial, earlier = folder / ".page", self._figures(folder)
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

    @classmethod
    def _figures(cls, folder: Path) -> set[str]:
        """Return the files that the result in a folder has for figures; none where its record cannot be read."""
        try:
            return {f"{panel.key}.svg" for panel in cls.from_record(read_record(folder)).layout().panels}
        except ValueError:
            return set()

    def _write(self, folder: Path) -> None:
        layout = self.layout()
        save_page(folder, self._html(layout), self.record(), layout.panels)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own, so that neither's style reaches the other."""
        content = html.escape(self.page(), quote=True)
        return f"<iframe srcdoc='{content}' style='width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0'></iframe>"


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_written(one)}" for name, one in value.items())
    return ", ".join(map(_written, value)) if isinstance(value, list) else str(value)


AnyResult = TypeVar("AnyResult", bound=Result)


def load_as(kinds: Sequence[type[AnyResult]], folder: Path) -> AnyResult:
    """Load the result in a folder, whose type is picked by the schema of its record.

    Args:
        kinds: the types; the default of their field `schema_` is the version that they read.
        folder: the folder of record.json.

    Raises:
        ValueError: there is no record, it is damaged, or no type reads its version.

    """
    record = read_record(folder)
    schema = str(record.get("schema"))
    known = {kind.model_fields["schema_"].default: kind for kind in kinds}
    if schema not in known:
        verb = schema.rpartition("/")[0]
        readable = [name for name in known if name.rpartition("/")[0] == verb] or sorted(known)
        raise ValueError(f"record.json is {schema[:60]!r}; this release reads {', '.join(readable)}")
    try:
        return known[schema].from_record(record)
    except ValueError as error:
        fault = fault_of(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"record.json: {fault}") from None
