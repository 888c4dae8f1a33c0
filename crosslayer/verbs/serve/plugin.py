"""The plugin that vLLM loads in each of its processes (entry point group `vllm.general_plugins`)."""

import logging
import os

ARCHITECTURE = "CrossLayerForCausalLM"
# Tested versions: the plugin overrides private methods of vLLM. 0.33 (torch 2.14, transformers below 5.21) has no build
# for CPUs yet and was not run.
VERSIONS = ("0.32",)
ALLOWED = "CROSSLAYER_ALLOW_METHODS"  # comma-separated modules of users' own methods, for vLLM's processes

logger = logging.getLogger("vllm.crosslayer")  # vLLM only shows loggers below its own name


def register() -> None:
    """Register crosslayer's config, decoder and serving class, and DeciLM, with vLLM, which may call it several times.

    With an unsupported version of vLLM it only logs an error, so that other models can still be served.
    """
    # The imports are below, since each of vLLM's processes calls this, also for models that are not ours.
    error = version_error()
    if error is not None:
        logger.error("%s: crosslayer models cannot be served", error)
        return
    from vllm import ModelRegistry

    import crosslayer.core.decoder.modeling  # noqa: F401  registers config and model with the Auto classes
    from crosslayer.core.methods import allow_methods

    allow_methods(*filter(None, os.environ.get(ALLOWED, "").split(",")))
    register_decilm()
    ModelRegistry.register_model(ARCHITECTURE, "crosslayer.verbs.serve.model:CrossLayerForCausalLM")


def register_decilm() -> None:
    """Register DeciLM's config, which vLLM lacks, with transformers, so that no code of a model's folder runs."""
    from transformers import AutoConfig

    from crosslayer.verbs.serve.configuration_decilm import DeciLMConfig

    AutoConfig.register(DeciLMConfig.model_type, DeciLMConfig, exist_ok=True)


def version_error() -> str | None:
    """Return why the installed vLLM cannot serve crosslayer models, None if it can."""
    try:
        import vllm
    except ImportError as error:
        return f"vLLM cannot be imported ({error})"
    if not vllm.__version__.startswith(VERSIONS):
        return f"crosslayer's plugin needs vLLM {' or '.join(VERSIONS)}, got vLLM {vllm.__version__}"
    return None
