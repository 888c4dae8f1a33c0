"""Proof that a causal LM is right: its files are its manifest's, and every way to run it gives the same logits."""

import copy
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.environment import environment, quiet_transformers
from crosslayer.models.load import DTYPES, EMBEDDED, load_model, resolve_device
from crosslayer.output import manifest
from crosslayer.verification.checks import BEAMS, CHECKS, NEW, Found, NotApplicable, Subject
from crosslayer.verification.page import write_verification
from crosslayer.verification.record import CheckRow, VerifyRecord

PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
TOKENS, FEWEST, SEED = 33, 16, 0
RECORD = "record.json"
# Measured over 33 tokens of SmolLM2, of five retrofits of it and of tiny models of 25 families: at most 3e-5 in
# float32. More layers and other kernels need room; the mildest fault planted, positions off by one behind the cache,
# makes 0.85.
EXACT = {"float64": 1e-8, "float32": 1e-3}
# Lower precisions have no one number: the root mean square of what bfloat16's rounding does to the plain pass is 0.045
# in SmolLM2, 0.01 to 0.04 in tiny models, 0.26 in SmolLM2 ruined by SVFormer. Two roundings were at most 1.4 times that
# from one another, √2 as if independent. Positions off by one make 0.094, unrelated logits 1.4.
ROUNDINGS, FLOOR, WEAK = 2, 0.005, 0.5


@dataclass(frozen=True)
class Check:
    """One row: `difference` and `tolerance` are in standard deviations of the logits unless `reason` says otherwise.

    The difference is the largest in float32 and float64, and the root mean square in lower precisions.
    """

    name: str
    dtype: str | None
    status: str
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""


def verify_source(
    name: str,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    device: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Check]:
    """Verify a model by name, loaded in float32; the files of a folder are checked before anything is loaded.

    Where files are damaged, or a folder cannot be loaded, a row says so, and the checks of the model are not run.

    Raises:
        ValueError: there is no such model, it is no causal LM, or the device or a dtype is unknown.

    """
    _check_dtypes(dtypes)
    target, path = resolve_device(device), Path(name).expanduser()
    local = name not in EMBEDDED and ((path / "config.json").is_file() or (path / manifest.NAME).exists())
    folder = path if local else None
    files = _files(folder)
    if files.status == FAIL:
        return [files]
    try:
        model, tokenizer = load_model(name, dtype="float32", device=target)
    except ValueError as error:
        if folder is None:
            raise
        return [files, Check("load", "float32", FAIL, reason=_line(error))]
    return verify(model, tokenizer, folder=folder, dtypes=dtypes, progress=progress)


def verify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    folder: Path | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    progress: Callable[[int, int, str], None] | None = None,
    compile_backend: str = "inductor",
) -> list[Check]:
    """Run every check on copies of a model, which itself stays as it is.

    Args:
        model: a causal LM, ours or a stock one.
        tokenizer: keeps its special tokens out of the random ids, since some models treat those in their own way.
        folder: where the model was loaded from; its `manifest.json` is checked too.
        dtypes: names of dtypes; each is compared with itself.
        progress: called before each check, and after the last, with the number of checks done, of all checks, and
            what runs now.
        compile_backend: backend of `torch.compile`.

    Raises:
        ValueError: the model is no causal LM with a key-value cache, a dtype is unknown, or the model has too few
            positions.

    """
    _check_dtypes(dtypes)
    _check_model(model)
    ids, done, total = _ids(model, tokenizer), 0, check_count(dtypes)
    tell = progress or (lambda done, total, doing: None)
    with quiet_transformers():
        tell(0, total, "manifest and plain pass")
        rows = _manifest_rows(model, folder)
        reference = _subject(model, ids, "float32", compile_backend).full
        for dtype in dtypes:
            subject = _subject(model, ids, dtype, compile_backend)
            rounding = subject.difference(reference)
            tolerance = EXACT.get(dtype) or max(FLOOR, ROUNDINGS * rounding)
            note = f"weak: rounding alone moves logits by {rounding:.1f}" if tolerance > WEAK else ""
            for name, check in CHECKS.items():
                tell(done, total, f"{name}, {dtype}")
                rows.append(_row(name, dtype, tolerance, partial(check, subject), note))
                done += 1
        tell(total, total, "")
    return rows


def write_record(rows: Sequence[Check], about: dict, out: Path, force: bool = False) -> Path:
    """Write record and page into a new folder, return the page's path; `about` holds model, command and seconds."""
    checks = [CheckRow(**asdict(row)) for row in rows]
    record = VerifyRecord(schema="crosslayer/verify/1", checks=checks, environment=environment(), **about)
    return write_verification(record.model_dump(by_alias=True), out, force)


def check_count(dtypes: Sequence[str]) -> int:
    """Return how many checks of a model there are, those of its manifest aside."""
    return len(CHECKS) * len(dtypes)


def _row(name: str, dtype: str | None, tolerance: float, check: Callable[[], Found], note: str = "") -> Check:
    """Run a check; whatever it raises is a row too. `note` is said where `tolerance` is used."""
    try:
        found = check()
    except NotApplicable as reason:
        return Check(name, dtype, NOT_APPLICABLE, reason=str(reason))
    except Exception as error:
        return Check(name, dtype, FAIL, reason=f"{type(error).__name__}: {_line(error)}")
    limit, note = (tolerance, note) if found.tolerance is None else (found.tolerance, "")
    reason = "; ".join(words for words in (found.reason, note) if words)
    if not math.isfinite(found.difference) or not math.isfinite(limit):
        return Check(name, dtype, FAIL, reason=f"the difference is {found.difference}, the tolerance {limit}")
    return Check(name, dtype, PASS if found.difference <= limit else FAIL, found.difference, limit, reason)


def _files(folder: Path | None) -> Check:
    """Compare the files of a folder with its manifest."""
    if folder is None:
        return Check("manifest", None, NOT_APPLICABLE, reason="the model is not a local folder")
    if not (folder / manifest.NAME).exists():
        if _is_retrofit(folder):
            reason = f"its {RECORD} says that this is a retrofit, and the {manifest.NAME} of a retrofit is missing"
            return Check("manifest: files", None, FAIL, reason=reason)
        return Check("manifest", None, NOT_APPLICABLE, reason=f"the folder has no {manifest.NAME}")
    try:
        wrong = manifest.check_files(folder)
    except (ValueError, OSError) as error:
        return Check("manifest: files", None, FAIL, reason=_line(error))
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Check("manifest: files", None, FAIL if wrong else PASS, reason="; ".join(wrong[:3]) + more)


def _is_retrofit(folder: Path) -> bool:
    """Return whether a folder holds the record of a retrofit, which is never written without a manifest.

    A config cannot say so: `save_pretrained` of a model trained further would repeat it in a folder that has none.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and str(record.get("schema", "")).startswith("crosslayer/retrofit/")


def _manifest_rows(model: PreTrainedModel, folder: Path | None) -> list[Check]:
    """Compare files, plan and fingerprint with the manifest."""
    files = _files(folder)
    if folder is None or files.status != PASS:
        return [files]
    given = manifest.read_manifest(folder)
    wrong = [] if manifest.plan_of(model) == given.plan else ["plan"]
    wrong += [] if manifest.methods_of(model) == given.methods else ["methods"]
    reason = f"{' and '.join(wrong)} in config.json are not the manifest's" if wrong else ""
    plan = Check("manifest: plan", None, FAIL if wrong else PASS, reason=reason)

    def compare() -> Found:
        now = manifest.fingerprint(model, given.fingerprint.ids)
        gap = torch.tensor(now.logits, dtype=torch.float64) - torch.tensor(
            given.fingerprint.logits, dtype=torch.float64
        )
        return Found(gap.abs().max().item() / given.fingerprint.std)

    # a model that was loaded in a lower precision than it was saved in is that far off
    tolerance = EXACT["float32"] if model.dtype in (torch.float32, torch.float64) else WEAK
    return [files, plan, _row("manifest: fingerprint", "float32", tolerance, compare)]


def _subject(model: PreTrainedModel, ids: Tensor, dtype: str, backend: str) -> Subject:
    """Copy a model into a dtype and run the plain pass; buffers such as RoPE's stay as loading leaves them."""
    used = copy.deepcopy(model).eval().requires_grad_(True)
    for parameter in used.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    used.generation_config = GenerationConfig(
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        length_penalty=0.0,  # so that a score is the sum of the log probabilities
        pad_token_id=0,
    )
    with torch.no_grad():
        full = used(ids, use_cache=False).logits[0]
    return Subject(used, ids, dtype, backend, full if full.dtype == torch.float64 else full.float())


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Return random ids (1, T) that are not special."""
    config = model.config.get_text_config(decoder=True)
    count = min(TOKENS, manifest.positions(model) - NEW)
    if count < FEWEST:
        raise ValueError(f"the model has {manifest.positions(model)} positions; verify needs {FEWEST + NEW}")
    special = {config.bos_token_id, config.pad_token_id, *(tokenizer.all_special_ids if tokenizer is not None else ())}
    ends = config.eos_token_id
    special |= set(ends) if isinstance(ends, list) else {ends}
    ordinary = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    chosen = torch.randint(len(ordinary), (1, count), generator=torch.Generator().manual_seed(SEED))
    return ordinary[chosen].to(model.device)


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"verify needs a causal LM; {name} is none")
    forwards = (inspect.signature(part.forward).parameters for part in (model, model.base_model))
    if not any("past_key_values" in parameters for parameters in forwards):
        raise ValueError(f"verify needs a model with a key-value cache; {name} keeps states of another kind")


def _check_dtypes(dtypes: Sequence[str]) -> None:
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes or len(set(dtypes)) != len(dtypes):
        raise ValueError(f"dtypes {', '.join(dtypes) or '(none)'}: name each once, of {', '.join(DTYPES)}")


def _line(error: Exception) -> str:
    """Return an error's text as one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]} …"
