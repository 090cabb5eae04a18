"""Small shapes and networks of every member, built in milliseconds."""

from dataclasses import replace

import torch

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import ConfigReader, EncoderConfig
from bertsmith.model.network import Network, new_network
from bertsmith.model.transformer.transformer_config import TransformerConfig

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 514,
}
OWN = {
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "albert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "ernie": {"use_task_id": True, "task_type_vocab_size": 3},
    "electra": {"embedding_size": 16},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {"pad_token_id": 1, "type_vocab_size": 1},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "modernbert": {"local_attention": 16, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64, "n_positions": 514},
    "elmo": {"cell_size": 40},
}


def tiny_config(model_type: str) -> dict:
    """The config.json of a tiny model."""
    sizes = {} if model_type in ("distilbert", "gpt2") else SIZES
    common = (
        {"vocab_size": 99} if model_type == "gpt2" else {"vocab_size": 99, "max_position_embeddings": 514}
    )
    return {"model_type": model_type, **common, **sizes, **OWN.get(model_type, {})}


def tiny_encoder_config(model_type: str = "bert", **changes) -> EncoderConfig:
    """The encoder config of a tiny model."""
    config = ARCHITECTURES[model_type].read_config(ConfigReader(tiny_config(model_type), "tiny"))
    if "width" in changes and config.embedding_width == config.width:
        changes["embedding_width"] = changes["width"]
    return replace(config, **changes)


def tiny_network(model_type: str = "bert", heads: dict[str, int] | None = None, seed: int = 0) -> Network:
    """A tiny network with published initial weights, not yet trained, in evaluation mode."""
    chosen = {"pooler": 0, "mlm": 0, "nsp": 2} if heads is None else heads
    return new_network(tiny_encoder_config(model_type), chosen, torch.Generator().manual_seed(seed)).eval()


TRANSFORMERS = tuple(
    name for name in ARCHITECTURES if isinstance(tiny_encoder_config(name), TransformerConfig)
)
"""The architectures with attention, layers that packing knows, and classes in transformers."""
