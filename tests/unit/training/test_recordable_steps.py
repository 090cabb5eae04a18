"""Which steps are recorded as CUDA graphs, and the reason why others are not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bertsmith.training.cuda_graphs import StepFacts, why_not_recorded

GPU = StepFacts(
    torch.device("cuda"), "bf16", "adamw", [SimpleNamespace(recordable=lambda _: True)], 1, one_graph=True
)


def test_an_ordinary_step_in_bf16_on_a_gpu_is_recorded():
    assert why_not_recorded(GPU) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu")}, "does not use a GPU"),
        ({"one_graph": False}, "not one graph"),
        ({"precision": "fp16"}, "precision is fp16"),
        ({"algorithm": "lamb"}, "lamb reads"),
        ({"processes": 2}, "over processes"),
        ({"recompute": True}, "recomputed"),
        ({"over_the_step": True}, "rows of a whole step"),
        ({"spike_factor": 4.0}, "run.spike_factor"),
        ({"followed": True}, "changed after each step"),
        ({"encoders": [*GPU.encoders, SimpleNamespace(recordable=lambda _: False)]}, "flash attention"),
    ],
)
def test_a_step_that_cannot_be_recorded_tells_the_reason(change, reason):
    assert reason in why_not_recorded(replace(GPU, **change))
