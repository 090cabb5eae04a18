"""Precision: the network as it was read, or a faster form of it for prediction only."""

import logging

import numpy as np
import torch

from bertsmith.core.errors import UserError
from bertsmith.inference.text_reader import Reader
from bertsmith.model.inference.inference_linear import can_pack
from bertsmith.model.inference.inference_network import (
    calibrated,
    convertible_blocks,
    int8_network,
    packed_network,
    real_network,
    stored_weights,
)
from bertsmith.model.kernels.torch_internals import has_bf16_products, has_int8_products
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch

CALIBRATION_TEXTS = 64
CALIBRATION_WORDS = (4, 48)
CALIBRATION_SEED = 0

log = logging.getLogger("bertsmith")


def usable_precision(requested: str, device: torch.device) -> str:
    """Return the precision to use for the requested one; warn if the CPU does not support it well."""
    fastest = fastest_precision(device)
    if requested == "auto":
        return fastest
    if requested == "bf16" and device.type == "cpu" and fastest != "bf16":
        log.warning(
            "this CPU does not have bf16 products and would emulate them, many times slower: using fp32"
        )
        return fastest
    if requested == "int8" and device.type == "cpu" and not has_int8_products():
        log.warning(
            "this CPU does not have 8-bit products (AVX-512 VNNI, AMX or ARM's dot products): "
            "int8 is hardly faster on it than fp32, or slower, and on x86 less exact"
        )
    return requested


def fastest_precision(device: torch.device) -> str:
    """Return bf16 if the machine has products for it, else fp32, which is faster than imitating them."""
    fast = device.type == "cuda" or (device.type == "cpu" and has_bf16_products())
    return "bf16" if fast else "fp32"


def takes_int8(network: Network, device: torch.device) -> bool:
    """True if a network was calibrated for 8-bit products, and the device has them."""
    computable = device.type == "cpu" and has_int8_products() and bool(convertible_blocks(network))
    return computable and bool(stored_weights(network))


def fast_network(network: Network, device: torch.device, over: Network | None = None) -> Network:
    """Return the fastest form of the network on a device; with `over`, share its packed weights."""
    fast = packed_network(network, over) if device.type == "cpu" else network
    return real_network(network) if fast is network else fast


def quantised_network(network: Network, reader: Reader, device: torch.device) -> Network:
    """Return the network with 8-bit products, calibrated before, or else on texts of the vocabulary."""
    if device.type != "cpu":
        raise UserError("int8 is for a CPU", where="precision", remedy=f"use bf16 on {device.type}")
    if not can_pack(torch.float32):
        raise UserError("this build of torch lacks oneDNN", where="precision", remedy="use fp32")
    if not convertible_blocks(network):
        others = network.config.model_type
        what = f"int8 supports layers as in BERT or ModernBERT, but not the layers of {others}"
        raise UserError(what, where="precision", remedy="use bf16 or fp32")
    rest = torch.bfloat16 if fastest_precision(device) == "bf16" else torch.float32
    weights = stored_weights(network) or calibrated(network, [_calibration_batch(reader)])
    return int8_network(network, weights, rest)


def _calibration_batch(reader: Reader) -> PackedBatch:
    """Return texts of random words of the vocabulary, of many lengths, always the same."""
    chance, tokenizer = np.random.default_rng(CALIBRATION_SEED), reader.tokenizer
    ordinary = sorted(set(range(tokenizer.vocabulary_size)) - tokenizer.special_ids - set(tokenizer.gaps))
    sampled = (chance.choice(ordinary, chance.integers(*CALIBRATION_WORDS)) for _ in range(CALIBRATION_TEXTS))
    texts = [tokenizer.decode(ids) for ids in sampled]
    sequences = reader.read([text for text in texts if text.strip()], truncate=True, first=0)
    ((_, batch),) = sequences.batches(sequences.tokens)
    return batch
