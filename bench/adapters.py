"""What three adapters over one encoder save in a server's memory, and what computing them beside it costs.

    python bench/adapters.py                       # over a BERT-Base of random weights
    python bench/adapters.py --model bert-base --precision bf16

Each way of serving is a process of its own, whose resident memory is read once every model has answered. The
adapters have random weights and a classifier each; speed is that of one of them on one thread.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch

from bertsmith.inference.adapter_folder import write_adapter
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.loaded_model import load
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.lora import LoraShape, adapters_of, add_fresh_adapters, with_shared_weights
from bertsmith.model.network import add_fresh_head, new_network
from bertsmith.model.transformer.transformer_config import TransformerConfig
from bertsmith.recipe.finetuning_schema import Target
from bertsmith.serve.model_registry import OpenedModels
from bertsmith.serve.server_config import ServerConfig
from bertsmith.tasks.objective import freeze_encoder
from bertsmith.text.tokenizer import Tokenizer

WAYS = {
    "torch and one tokenizer": (),
    "the base alone": ("base",),
    "the base and three adapters": ("base", "one", "two", "three"),
    "three merged folders": ("merged-one", "merged-two", "merged-three"),
}
TEXTS = ["The cat sat under the old tree and looked at the river until it began to rain."] * 64


def main() -> None:
    options = parse()
    if options.serve is not None:
        print(json.dumps(served(options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_folders(place, options)
        for way, names in WAYS.items():
            command = [sys.executable, __file__, "--serve", ",".join(names), "--place", str(place)]
            command += ["--precision", options.precision]
            told = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(told.stdout)
            speed = f", {found['texts_a_second']:,.1f} texts/s" if names else ""
            print(f"{way:30} {found['megabytes']:8,.0f} MB{speed}")
        sizes = {name: size_of(place / name) for name in ("base", "one", "merged-one")}
        print("on disk: " + ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder or name; without it random weights")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="query,value", help=", ".join(get_args(Target)))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_folders(place: Path, options: argparse.Namespace) -> None:
    """The base, three adapters over it, and the three as folders of their own."""
    if options.model is None:
        tokenizer = Tokenizer.load(default_model())
        config = TransformerConfig(
            model_type="bert",
            vocabulary=tokenizer.vocabulary_size,
            width=768,
            layers=12,
            heads=12,
            inner=3072,
            embedding_width=768,
            positions=512,
        )
        write_model(
            place / "base", Model(new_network(config, {"pooler": 0}, torch.Generator().manual_seed(0)))
        )
        tokenizer.save(place / "base")
    else:
        bert = load(options.model, device="cpu")
        for name in set(bert.heads) - {"pooler"}:  # each adapter brings a head of its own
            del bert.model.network.heads[name]
        bert.save(place / "base")
    base, shape = load(place / "base", device="cpu").model.network, LoraShape(options.rank, 16.0)
    for seed, name in enumerate(("one", "two", "three")):
        network, stream = with_shared_weights(base), torch.Generator().manual_seed(seed)
        add_fresh_head(network, "classify", 2, stream)
        freeze_encoder(network)
        add_fresh_adapters(network, options.targets.split(","), shape, stream)
        for _, adapter in adapters_of(network):
            adapter.lora_B.data.normal_(0, 0.02, generator=stream)
        (place / name).mkdir()
        write_adapter(place / name, network, "classify", shape=shape, base="../base")
        load(place / name, device="cpu").save(place / f"merged-{name}")


def served(options: argparse.Namespace) -> dict[str, float]:
    """The memory of a process that serves some folders, and how fast the last of them answers."""
    torch.set_num_threads(1)
    folders = {name: options.place / name for name in options.serve.split(",") if name}
    if not folders:
        tokenizer = Tokenizer.load(options.place / "base")
        return {"megabytes": resident_megabytes(), "tokens": len(tokenizer.encode(TEXTS[0]).ids)}
    opened = OpenedModels(ServerConfig(models=folders, device="cpu", precision=options.precision))
    models = [opened.open(folder) for folder in folders.values()]
    for bert in models:
        bert.embed(TEXTS[:2])
    gc.collect()
    begun = time.perf_counter()
    models[-1].embed(TEXTS)
    return {
        "texts_a_second": len(TEXTS) / (time.perf_counter() - begun),
        "megabytes": resident_megabytes(),
    }


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    return int(kilobytes) / 1000


def size_of(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
