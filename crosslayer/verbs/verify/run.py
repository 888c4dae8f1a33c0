"""Check a causal LM: its files match its manifest, and every way to run it gives the same logits."""

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import quiet_transformers
from crosslayer.machine import full_float32
from crosslayer.models.load import DTYPES, EMBEDDED, load_model, public_name, resolve_device
from crosslayer.models.pair import causal_config
from crosslayer.output import manifest
from crosslayer.output.progress import progress
from crosslayer.output.record import read_record
from crosslayer.probe.model import unwrapped
from crosslayer.verbs.verify.checks import CHECKS, EXACT, WEAK, WITH_BITS, Measurement, in_brief, judged, tolerance_of
from crosslayer.verbs.verify.result import FAIL, NOT_APPLICABLE, PASS, Check, Verification
from crosslayer.verbs.verify.subject import RECENT, random_ids, subject_of
from crosslayer.wiring.kv_bits import KvBits, parse_kv_bits

DTYPES_CHECKED = ("float32", "bfloat16")
CODES = "in float64, since rounding in lower precisions decides between neighboring codes"
SHOWN = 3  # files that a message names


def verify(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    kv_bits: str | None = None,
    device: str | None = None,
    folder: str | Path | None = None,
    compile_backend: str = "inductor",
) -> Verification:
    """Check that a causal language model is intact and gives the same logits however it runs.

    The checks run on copies; the model does not change.

    The files of a folder are checked first. If they are damaged or cannot be loaded, that check fails, and the others
    do not run.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3, loaded in float32. In Python also a loaded model.
        tokenizer: in Python, the tokenizer of a loaded model; its special tokens are not used as test ids.
        dtypes: dtypes to check; each is compared with a plain pass in the same dtype.
        kv_bits: check a KV cache quantized to 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29. Runs in float64,
            because rounding in lower precision may select a neighboring code.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name or path.
        folder: in Python, the folder of a loaded model; its `manifest.json` is checked too.
        compile_backend: in Python, the backend of `torch.compile`.

    Raises:
        ValueError: the model does not exist, is not a causal LM with a KV cache, or has too few positions; the
            device or a dtype is unknown; or an option does not apply.
    """
    model = unwrapped(model)
    bits = None if kv_bits is None else replace(parse_kv_bits(kv_bits), recent=RECENT)
    if bits is not None and tuple(dtypes) != DTYPES_CHECKED:
        raise ValueError("`kv_bits` is checked in float64 only, where rounding has no effect; leave `dtypes` out")
    # a single text would be read as a list of its letters
    names = [dtypes] if isinstance(dtypes, str) else [str(dtype) for dtype in dtypes]
    if isinstance(dtypes, str) or not names or len({*names} & {*DTYPES}) < len(names):
        got = ", ".join(names) or "none"
        raise ValueError(f"`dtypes` must be one or more of {', '.join(DTYPES)}, each once, in a list, got {got}")
    checked = tuple(dtypes) if bits is None else ("float64",)
    started = time.monotonic()
    if isinstance(model, PreTrainedModel):
        if device is not None:
            raise ValueError(
                "device applies only if the model is a name or path, got a loaded model; use model.to(device)"
            )
        path = None if folder is None else Path(folder).expanduser()
        checks = _check_loaded(model, tokenizer, path, checked, bits, compile_backend)
    else:
        if tokenizer is not None or folder is not None:
            raise ValueError("tokenizer and folder apply only to a loaded model, got a name or path")
        checks = _check_named(str(model), device, checked, bits, compile_backend)
    seconds = round(time.monotonic() - started, 1)
    return Verification(model=public_name(model), checks=tuple(checks), seconds=seconds)


def _check_named(
    name: str, device: str | None, dtypes: Sequence[str], bits: KvBits | None, backend: str
) -> list[Check]:
    """Check the files of a model, load it in float32 and check it."""
    target = resolve_device(device)
    path = Path(name).expanduser()
    # an embedded model's name wins over a folder of that name, as in `load_model`
    local = name not in EMBEDDED and ((path / "config.json").is_file() or (path / manifest.NAME).exists())
    folder = path if local else None
    with progress(f"checking and loading {name}", 0):
        # before anything is loaded from damaged files
        files = check_files(folder)
        if files.status == FAIL:
            return [files]
        try:
            model, tokenizer = load_model(name, dtype="float32", device=target)
        except ValueError as error:
            if folder is None:
                raise
            return [files, Check(name="load", dtype="float32", status=FAIL, reason=in_brief(error))]
    return _check_loaded(model, tokenizer, folder, dtypes, bits, backend)


def _check_loaded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path | None,
    dtypes: Sequence[str],
    bits: KvBits | None,
    backend: str,
) -> list[Check]:
    """Run every check on copies of a loaded model, with `bits` those of a quantized KV cache."""
    name = type(model).__name__
    causal_config("verify", model)
    forwards = (inspect.signature(module.forward).parameters for module in (model, model.base_model))
    # a Mamba caches its states only
    attends = hasattr(model.config.get_text_config(), "num_attention_heads")
    if not attends or not any(CACHE in parameters for parameters in forwards):
        raise ValueError(f"verify needs a model with a KV cache, but {name} has none")
    chosen = {name: check for name, check in CHECKS.items() if bits is None or name in WITH_BITS}
    ids = random_ids(model, tokenizer)
    done = 0
    total = len(chosen) * len(dtypes)
    # Trainer turns on TF32 for the whole process, which made sound models fail
    with quiet_transformers(), full_float32(), progress("verifying", total) as meter:
        meter.step(0, total, "manifest and plain pass")
        checks = check_manifest(model, folder)
        # the plain pass in float32, from which rounding to each dtype is measured
        with subject_of(model, ids, "float32", backend, bits) as plain:
            reference = plain.full  # (T, V)
        for dtype in dtypes:
            with subject_of(model, ids, dtype, backend, bits) as subject:
                tolerance, note = tolerance_of(dtype, subject.difference(reference))
                note = note if bits is None else CODES
                for name, check in chosen.items():
                    meter.step(done, total, f"{name}, {dtype}")
                    checks.append(judged(name, dtype, tolerance, partial(check, subject), note))
                    done += 1
        meter.step(total, total, "")
    return checks


def check_files(folder: Path | None) -> Check:
    """Compare the files of a folder with its manifest; nothing is loaded."""
    if folder is None:
        return Check(name="manifest", dtype=None, status=NOT_APPLICABLE, reason="the model is not a local folder")
    if not (folder / manifest.NAME).exists():
        # A retrofit is never written without a manifest. Its record shows what it is; its config does not, since
        # `save_pretrained` writes that to folders without a manifest too.
        try:
            is_retrofit = str(read_record(folder).get("schema")).startswith("crosslayer/retrofit/")
        except ValueError:
            is_retrofit = False
        if is_retrofit:
            reason = f"{manifest.NAME} is missing, although record.json shows that this is a retrofit"
            return Check(name="manifest: files", dtype=None, status=FAIL, reason=reason)
        return Check(name="manifest", dtype=None, status=NOT_APPLICABLE, reason=f"the folder has no {manifest.NAME}")
    try:
        wrong = manifest.check_files(folder)
    except (ValueError, OSError) as error:
        return Check(name="manifest: files", dtype=None, status=FAIL, reason=in_brief(error))
    more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    reason = "; ".join(wrong[:SHOWN]) + more
    return Check(name="manifest: files", dtype=None, status=FAIL if wrong else PASS, reason=reason)


def check_manifest(model: PreTrainedModel, folder: Path | None) -> list[Check]:
    """Compare files, plan and fingerprint of a loaded model with the manifest of its folder."""
    files = check_files(folder)
    if folder is None or files.status != PASS:
        return [files]
    written = manifest.read_manifest(folder)
    plan, methods = manifest.plan_and_methods(model.config)
    differences = []
    if plan != written.plan:
        differences.append("plan")
    if methods != written.methods:
        differences.append("methods")
    reason = f"config.json and manifest.json differ in {' and '.join(differences)}" if differences else ""
    wiring = Check(name="manifest: plan", dtype=None, status=FAIL if differences else PASS, reason=reason)

    def compare() -> Measurement:
        now = manifest.fingerprint(model, written.fingerprint.ids)
        pair = torch.tensor([now.logits, written.fingerprint.logits], dtype=torch.float64)  # (2, entries)
        return Measurement((pair[0] - pair[1]).abs().max().item() / written.fingerprint.std)

    # loading in a lower precision than that of the files changes the logits by rounding
    tolerance = EXACT["float32"] if model.dtype in (torch.float32, torch.float64) else WEAK
    return [files, wiring, judged("manifest: fingerprint", "float32", tolerance, compare)]
