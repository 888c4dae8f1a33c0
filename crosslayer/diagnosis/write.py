"""Write the folder of a result: record.json, report.html and one SVG for each figure."""

from pathlib import Path
from typing import Any

from crosslayer.diagnosis import page as diagnosis
from crosslayer.diagnosis.record import DiagnosisRecord
from crosslayer.output.folder import whole_folder
from crosslayer.output.page import measured_on, page, save_page


def write_diagnosis(record: dict[str, Any], out: Path, force: bool = False) -> tuple[Path, dict[str, Any]]:
    """Write a diagnosis to `out`, whole or not at all; return the page's path and the headline figures."""
    checked = DiagnosisRecord.model_validate(record)
    model, settings = checked.model, checked.settings
    name = settings.get("model") or model["class"]
    text = measured_on(settings["sequences"], settings["length"], settings.get("text"), settings.get("documents"))
    subtitle = f"{model['class']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers · {text}"
    panels = diagnosis.panels(checked)
    with whole_folder(out, force) as folder:
        text = page(
            f"Diagnosis of {name}",
            subtitle,
            diagnosis.cards(checked),
            checked.verdict["words"],
            panels,
            diagnosis.tables(checked),
        )
        save_page(folder, text, record, panels)
    sink, share = checked.verdict["sink"], checked.verdict["kv_share"]
    headline = {
        "model": name,
        "sink_layers": sink["layers"],
        "strongest_sink": {"layer": sink["strongest"], "share": round(sink["strongest_share"], 4)},
        "hidden_norm_ratio_max": _largest(checked.measures["hidden_norm_ratio"].mean),
        "kv_share_uniattn": None if share is None else round(share["paper"]["uniattn"], 4),
        "seconds": round(checked.seconds, 2),
        "report": str(out / "report.html"),
    }
    return out / "report.html", headline


def _largest(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 2) if known else None
