"""bertsmith forges BERTs: one PyTorch codebase from raw text to a served model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.api import evaluate, finetune, predict, pretrain
    from bertsmith.api_verbs import verbs
    from bertsmith.core.errors import UserError
    from bertsmith.inference.feature_folder import extract_features, open_features
    from bertsmith.inference.loaded_model import Bert, load
    from bertsmith.model.encoder import Encoder
    from bertsmith.packed import PackedBatch
    from bertsmith.text.tokenizer import Tokenizer

from bertsmith.core.version import VERSION as __version__

__all__ = [
    "Bert",
    "Encoder",
    "PackedBatch",
    "Tokenizer",
    "UserError",
    "__version__",
    "evaluate",
    "extract_features",
    "finetune",
    "load",
    "open_features",
    "predict",
    "pretrain",
    "verbs",
]

# Resolved at first use, so that `import bertsmith` and `bertsmith --help` do not wait for torch.
_HOMES = {
    "Bert": "bertsmith.inference.loaded_model",
    "Encoder": "bertsmith.model.encoder",
    "PackedBatch": "bertsmith.packed",
    "Tokenizer": "bertsmith.text.tokenizer",
    "UserError": "bertsmith.core.errors",
    "evaluate": "bertsmith.api",
    "extract_features": "bertsmith.inference.feature_folder",
    "finetune": "bertsmith.api",
    "load": "bertsmith.inference.loaded_model",
    "open_features": "bertsmith.inference.feature_folder",
    "predict": "bertsmith.api",
    "pretrain": "bertsmith.api",
    "verbs": "bertsmith.api_verbs",
}


def __getattr__(name: str) -> Any:
    """The public name, imported from its home at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names of this module, imported or not."""
    return sorted({*globals(), *__all__})
