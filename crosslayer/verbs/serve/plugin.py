"""The plugin that vLLM loads in each of its processes (entry point group `vllm.general_plugins`)."""

import logging
import os

ARCHITECTURE = "CrossLayerForCausalLM"
VERSIONS = ("0.32",)  # that were tested: what is overridden in vLLM's backend is private
ALLOWED = "CROSSLAYER_ALLOW_METHODS"  # modules of users' own methods, with commas between, for vLLM's processes

logger = logging.getLogger("vllm.crosslayer")  # vLLM shows what is logged below its own name


def register() -> None:
    """Tell vLLM of our config, our decoder and the class that serves it, and of DeciLM; vLLM may call it several times.

    With a version of vLLM that does not fit it says so in the log and registers nothing, so that other models go on.
    """
    fault = version_fault()
    if fault is not None:
        logger.error("%s: no crosslayer model can be served", fault)
        return
    from vllm import ModelRegistry  # type: ignore[import-not-found]

    import crosslayer.core.decoder  # noqa: F401  registers our config and model with the Auto classes
    from crosslayer.core.methods import allow_methods

    allow_methods(*filter(None, os.environ.get(ALLOWED, "").split(",")))
    register_decilm()
    ModelRegistry.register_model(ARCHITECTURE, "crosslayer.verbs.serve.model:CrossLayerForCausalLM")


def register_decilm() -> None:
    """Tell transformers of the config of DeciLM, which vLLM's model has none for: no code of a folder runs for it."""
    from transformers import AutoConfig

    from crosslayer.verbs.serve.configuration_decilm import DeciLMConfig

    AutoConfig.register(DeciLMConfig.model_type, DeciLMConfig, exist_ok=True)


def version_fault() -> str | None:
    """Return in words what is wrong with the vLLM that is installed, None where it can serve our models."""
    try:
        import vllm  # type: ignore[import-not-found]
    except ImportError as error:
        return f"vLLM cannot be imported ({error})"
    if not vllm.__version__.startswith(VERSIONS):
        return f"crosslayer's plugin is for vLLM {' and '.join(VERSIONS)}, and this is vLLM {vllm.__version__}"
    return None
