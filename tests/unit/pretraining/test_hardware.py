"""What "auto" comes to on a machine, what does not fit, and how much arithmetic a step is."""

import pytest
import torch

from bertsmith.core.errors import Diverged, DoesNotFit, UserError
from bertsmith.data.collate import Multiples
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.flops import flops_per_step
from bertsmith.model.network import build_network
from bertsmith.pretraining.hardware import (
    CPU_MICRO_OPERATIONS,
    CPU_MICRO_TOKENS,
    MEMORY_OF_LINUX,
    Machine,
    choices,
    fit_machine,
    free_bytes,
    peak_by_name,
    peak_of,
    product_flops,
)
from bertsmith.pretraining.initial_model import build_initial_model, encoder_config_of
from bertsmith.pretraining.pretrained_model import check_held_out_is_finite
from bertsmith.recipe.load import load_recipe
from bertsmith.training.distributed import ALONE, World
from bertsmith.training.memory_share import MEMORY_SHARE, plannable_gpu_bytes
from tests.tiny import tiny_network
from tests.tiny_runs import tiny_recipe


def fitted(store, *overrides: str, before: int | None = None) -> Machine:
    recipe = tiny_recipe(*overrides)
    return fit_machine(recipe, build_initial_model(recipe, store).network, ALONE, micro_tokens_before=before)


def test_a_cpu_gets_fp32_and_the_same_bits(store):
    machine = fitted(store)
    assert (machine.precision, machine.compiled, machine.deterministic) == ("fp32", False, True)
    assert (machine.micro_tokens, machine.loader_workers) == (CPU_MICRO_TOKENS, 0)


@pytest.mark.parametrize(
    ("has_bf16", "processes", "parallel", "expected"),
    [
        (True, 1, "ddp", "bf16"),
        (True, 2, "fsdp", "bf16"),
        (False, 1, "ddp", "fp16"),
        (False, 1, "fsdp", "fp16"),  # one process has nothing to shard
        (False, 2, "fsdp", "bf16"),  # imitated, for a loss scale does not go with shards
    ],
)
def test_a_gpu_gets_bf16_and_an_older_one_what_it_can_do(
    store, monkeypatch, has_bf16, processes, parallel, expected
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 34, 1 << 34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    recipe = tiny_recipe(f"run.parallel={parallel}", "batch.micro_tokens=128")
    world = World(rank=0, size=processes, local_rank=0, device=torch.device("cuda"))
    assert fit_machine(recipe, build_initial_model(recipe, store).network, world).precision == expected


def test_what_the_recipe_says_is_done(store):
    said = ("run.precision=bf16", "run.compile=on", "run.deterministic=off", "run.loader_workers=3")
    machine = fitted(store, *said, "batch.micro_tokens=100")
    assert (machine.precision, machine.compiled, machine.deterministic) == ("bf16", True, False)
    assert (machine.micro_tokens, machine.loader_workers) == (100, 3)


def test_a_network_that_cannot_be_compiled_is_not_said_to_be():
    machine = fit_machine(tiny_recipe("run.compile=on"), tiny_network("deberta-v2", heads={"mlm": 0}), ALONE)
    assert not machine.compiled and ", not compiled;" in machine.notes[0]


def test_a_run_that_resumes_keeps_its_micro_batches(store):
    assert fitted(store, before=1024).micro_tokens == 1024
    assert fitted(store, "batch.micro_tokens=100", before=1024).micro_tokens == 100


def test_a_sequence_always_fits_with_its_filler(store):
    assert fitted(store, before=8).micro_tokens == 32 + 64


def test_a_large_model_gets_small_forward_passes_on_a_cpu_so_that_a_step_can_be_stopped(store):
    large = ("model.width=512", "model.inner=2048", "model.heads=8", "model.layers=8")
    recipe = tiny_recipe(*large)
    with torch.device("meta"):
        network = build_network(encoder_config_of(recipe.model, store.tokenizer()), {"mlm": 0})
    chosen = fit_machine(recipe, network, ALONE).micro_tokens
    assert 1024 <= chosen < CPU_MICRO_TOKENS
    operations = flops_per_step([network], PassSize(chosen, chosen // 32, chosen // 6))
    assert CPU_MICRO_OPERATIONS / 2.2 < operations < CPU_MICRO_OPERATIONS * 1.1
    said = tiny_recipe(*large, "batch.micro_tokens=8192")
    assert fit_machine(said, network, ALONE).micro_tokens == 8192


def test_what_cannot_fit_into_memory_is_reported_with_the_remedy(store):
    with pytest.raises(UserError) as caught:
        fitted(store, "batch.micro_tokens=1_000_000_000_000")
    assert "batch.micro_tokens: 1000000000000 tokens need about" in caught.value.line()
    assert "set batch.micro_tokens to auto, or run.recompute to true" in caught.value.line()


def test_memory_that_only_caches_files_counts_as_free(store):
    if not MEMORY_OF_LINUX.is_file():
        pytest.skip("only Linux says what it could free")
    known = dict(line.split(":", 1) for line in MEMORY_OF_LINUX.read_text().splitlines())
    gibibytes = int(known["MemAvailable"].split()[0]) / 2**20
    note = fitted(store).notes[1]
    assert float(note.split(" of ")[1].split(" GiB")[0]) == pytest.approx(gibibytes, rel=0.2)


def test_products_of_a_cpu_are_measured_and_those_of_an_unknown_gpu_are_not(monkeypatch):
    assert product_flops(torch.device("cpu")) > 1e6
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert product_flops(torch.device("cuda")) == 790e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    assert product_flops(torch.device("cuda")) is None


def test_where_sources_disagree_the_choice_is_reported():
    notes = "\n".join(choices(load_recipe("bert-base")))
    assert "256 sequences a step, pairs nsp, dynamic masks by token, rounded count" in notes
    assert "adamw without bias correction, google learning-rate line, gelu" in notes
    muon = [
        *("optim.algorithm=muon", "optim.peak_lr=2e-3", "optim.matrix_lr_factor=2", "optim.schedule=wsd"),
        "optim.head_lr_factor=3",
    ]
    assert choices(load_recipe("bert-base", muon))[1] == (
        "muon at 0.004 (momentum 0.95, scale original) for the layers' matrices, adamw at 0.002 without bias "
        "correction for the rest, 3 x for the heads, wsd learning-rate line (flat until 50% of the run), gelu"
    )
    averaged = choices(load_recipe("bert-base", ["run.average_from=0.8", "run.average_decay=0.99"]))
    assert "the model is the exponential average (decay 0.99) of the weights after 80% of the run" in averaged
    by_tokens = "\n".join(choices(load_recipe("bert-base", ["batch.by=tokens", "batch.tokens=4096"])))
    assert "4,096 tokens a step (a deviation: the published sizes are in sequences)" in by_tokens
    pairs = ["examples.pairs=sentence-pair", "batch.tokens=4096"]
    assert "256 sequences a step (a deviation" in "\n".join(choices(load_recipe("bert-base", pairs)))
    assert "deviation" not in "\n".join(choices(load_recipe("bert-base", [*pairs, "batch.by=tokens"])))


# ---- arithmetic


def test_no_peak_is_known_of_a_cpu():
    assert peak_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 790e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
    ],
)
def test_a_gpu_is_known_by_whole_words_of_its_name(name, peak):
    assert peak_by_name(name) == peak


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ((), True),
        (("batch.micro_tokens=640",), False),  # a step of several passes
        (("run.spike_factor=4",), False),
        (("run.recompute=true",), False),
        (("run.precision=fp16",), False),
        (("optim.algorithm=lamb",), False),
        (("run.compile=off",), False),
        (("batch.sequences=8000000", "batch.micro_tokens=400000000"), False),  # busy enough
    ],
)
def test_small_steps_on_a_gpu_are_recorded_with_few_sizes(store, monkeypatch, settings, recorded):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 50, 1 << 50))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    recipe = tiny_recipe("batch.sequences=1024", *settings)
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cuda"))
    machine = fit_machine(recipe, build_initial_model(recipe, store).network, world)
    assert machine.recorded == recorded
    # 1,024 sequences of at most 32 tokens; about a fifth of the tokens is predicted.
    assert machine.multiples == (Multiples(512, 128, 256) if recorded else Multiples(64, 64))
    assert ("CUDA graphs" in machine.notes[0]) == recorded


def test_a_run_of_a_study_plans_with_its_share_of_the_whole_memory(store, monkeypatch):
    if not MEMORY_OF_LINUX.is_file():
        pytest.skip("only Linux says how much there is")
    known = dict(line.split(":", 1) for line in MEMORY_OF_LINUX.read_text().splitlines())
    monkeypatch.setenv(MEMORY_SHARE, "0.25")
    assert free_bytes(ALONE) == int(known["MemTotal"].split()[0]) * 1024 // 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 34))
    assert plannable_gpu_bytes(torch.device("cuda")) == 1 << 32
    monkeypatch.setenv(MEMORY_SHARE, "1e-12")
    with pytest.raises(DoesNotFit, match="weights, gradients and moments need"):
        fitted(store)


def test_a_held_out_loss_that_is_not_a_number_is_a_divergence():
    check_held_out_is_finite({"loss": 3.0}, where="run")
    with pytest.raises(Diverged, match="^run: the run ended with a held-out loss that is not a number"):
        check_held_out_is_finite({"loss": float("nan")}, where="run")
