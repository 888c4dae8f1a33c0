"""Two diagnoses next to each other: a model and its baseline, such as a retrofit and the model that it comes from."""

from collections.abc import Sequence
from dataclasses import replace

from crosslayer.output.formatting import Table, ranges
from crosslayer.output.panel import QUIET, Line, Panel
from crosslayer.verbs.diagnose.curves import highest, lowest, mean_over_layers
from crosslayer.verbs.diagnose.result import Diagnosis


def beside(record: Diagnosis, baseline: Diagnosis) -> Table:
    """Return what both models show, a column each."""
    columns = [_figures(each) for each in (record, baseline)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return "Compared with the baseline", ["", record.model.name, f"{baseline.model.name} (baseline)"], rows


def panels_beside(panels: Sequence[Panel], baseline: Sequence[Panel], names: tuple[str, str]) -> list[Panel]:
    """Return a model's figures with the baseline's: its lines dashed in the same figure, its heat map behind.

    `names` are those of the model and of the baseline.
    """
    name, other_name = names
    others = {panel.key: panel for panel in baseline}
    figures = []
    for panel in panels:
        other = others.get(panel.key)
        if other is None:
            figures.append(panel)
        elif panel.heat is None:
            lines = [replace(line, name=line.name or name) for line in panel.lines]
            dashed = [_dashed(line, other_name) for line in other.lines]
            figures.append(replace(panel, lines=[*lines, *dashed]))
        else:
            figures += [panel, replace(other, key=f"{panel.key}_baseline", title=f"{panel.title}: {other_name}")]
    return figures


def _dashed(line: Line, name: str) -> Line:
    """Return a line of the baseline, without its band, which would cover the model's."""
    shown = f"{name}: {line.name}" if line.name else name
    return replace(line, name=shown, low=None, high=None, color=line.color or QUIET, dashed=True)


def _figures(record: Diagnosis) -> dict[str, str]:
    measures, sink, neighbors = record.measures, record.verdict.sink, record.verdict.neighbors
    peak, value = highest(measures.hidden_norm_ratio), lowest(measures.value_norm_ratio)
    similar, without_first = neighbors.map_similarity, neighbors.map_similarity_without_first
    return {
        "layers, with attention": f"{record.model.layers}, {record.model.attention_layers}",
        "sink layers": ranges(sink.layers) or "none",
        "attention on the first token, mean over layers": f"{mean_over_layers(measures.first_token_share):.1%}",
        "attention on the first token, at most": f"{sink.strongest_share:.1%} (layer {sink.strongest})",
        "hidden norm of the first token ÷ median, at most": f"{peak[1]:.3g} (layer {peak[0]})",
        "value norm of the first token ÷ median, at least": f"{value[1]:.2f} (layer {value[0]})",
        "map similarity of neighbors, upper half": "—" if similar is None else f"{similar:.2f}",
        "… ignoring the first token": "—" if without_first is None else f"{without_first:.2f}",
        "cos(x, x + Attn(x)), mean over layers": f"{mean_over_layers(measures.attention_io_similarity):.3f}",
        "entropy of attention, mean over layers": f"{mean_over_layers(measures.entropy):.2f} nats",
    }
