from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bertsmith
from bertsmith.inference import engine
from bertsmith.model.kernels.fused_gelu import linear_gelu, product_takes
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from tests.tiny import tiny_encoder_config

pytestmark = pytest.mark.gpu


def test_texts_of_many_windows_and_batches_keep_their_order(monkeypatch):
    texts = [" ".join(["snow", "falls", "again"] * (number * 7 % 40 + 1)) for number in range(500)]
    expected = bertsmith.load("bertsmith-small", device="cpu", precision="fp32").embed(texts)
    bert = bertsmith.load("bertsmith-small", device="cuda", precision="fp32")
    whole = bert.embed(texts)
    monkeypatch.setattr(engine, "FIRST_WINDOW_TEXTS", 7)
    monkeypatch.setattr(engine, "WINDOW_TEXTS", 31)
    monkeypatch.setitem(engine.BATCH_TOKENS, "cuda", 400)
    assert torch.allclose(whole, expected, atol=1e-4)
    assert torch.allclose(bert.embed(texts), whole, atol=1e-4)


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_gelu_inside_of_a_product_is_nearer_to_the_exact_one_than_behind_it(size):
    torch.manual_seed(0)
    linear = nn.Linear(256, 1024).cuda().bfloat16()
    nn.init.normal_(linear.weight, std=size / 16)  # so that what is activated has this deviation
    values = torch.randn(4096, 256, device="cuda").bfloat16()
    exact = nn.functional.gelu(
        nn.functional.linear(values.double(), linear.weight.double(), linear.bias.double())
    )
    with torch.no_grad():
        assert product_takes(values, linear.weight)
        inside, behind = linear_gelu(values, linear), nn.functional.gelu(linear(values))
    assert (inside - exact).square().mean() < (behind - exact).square().mean()


@pytest.mark.parametrize("length", [3, 40, 100, 200, 480])
def test_no_kernel_is_compiled_after_the_warm_up(length):
    from bertsmith.model.attention.short_triton import short_attention_forward
    from bertsmith.model.attention.tiled_triton import tiled_attention_forward

    config = tiny_encoder_config("bert", width=64, heads=2, inner=128, positions=512)
    network = new_network(config, {}, torch.Generator().manual_seed(1))
    network = network.to("cuda", torch.bfloat16).eval()
    reader = SimpleNamespace(longest=512)
    engine.Engine(network, reader, torch.device("cuda")).warm_up()

    def compiled():
        kernels = (short_attention_forward, tiled_attention_forward)
        return [len(each.device_caches[torch.cuda.current_device()][0]) for each in kernels]

    before = compiled()
    with torch.no_grad():
        network(pack([[0] * length, [0] * 3]).to("cuda"))
    assert compiled() == before and min(before) > 0
