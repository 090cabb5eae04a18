"""transformers models of every member, tiny and with lively random weights: oracles of parity tests."""

from pathlib import Path

import torch
import transformers
from torch import nn

from tests.tiny import tiny_config

CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "albert": "Albert",
    "distilbert": "DistilBert",
    "ernie": "Ernie",
    "electra": "Electra",
    "modernbert": "ModernBert",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "deberta-v2": "DebertaV2",
    "gpt2": "GPT2",
}
KINDS = {"gpt2": {"ForMaskedLM": "LMHeadModel"}}
"""What classes of a family are called that its neighbours call otherwise."""
ENDS = {"bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def oracle_class(model_type: str, kind: str) -> type[nn.Module]:
    """A class of transformers, `kind` being what stands behind its family name (Model, ForMaskedLM, ...)."""
    return getattr(transformers, CLASSES[model_type] + KINDS.get(model_type, {}).get(kind, kind))


def oracle(model_type: str, kind: str, **changes) -> nn.Module:
    """A transformers model of that class."""
    torch.manual_seed(7)
    config = {**tiny_config(model_type), **(ENDS if model_type == "modernbert" else {}), **changes}
    config.pop("model_type")
    settings = getattr(transformers, f"{CLASSES[model_type]}Config")(**config)
    settings._attn_implementation = "eager"
    model = oracle_class(model_type, kind)(settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from initial weights: nothing may hide behind zero biases and unit LayerNorms.
            centre = 1.0 if ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.15)
    model.tie_weights()
    return model


def saved_oracle(folder: Path, model_type: str, kind: str, **changes) -> nn.Module:
    """The same, also saved as a model folder."""
    model = oracle(model_type, kind, **changes)
    model.save_pretrained(folder)
    return model
