"""The benchmarks' peers compute what transformers does: a ratio against a wrong peer says nothing."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.tiny import tiny_network
from tests.toy_folder import write_toy_folder

BENCH = str(Path(__file__).parents[2] / "bench")


@pytest.fixture(autouse=True)
def benches(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)


@pytest.mark.parametrize(
    ("model_type", "heads"), [("bert", {"pooler": 0, "mlm": 0, "nsp": 2}), ("modernbert", {"mlm": 0})]
)
def test_a_head_on_masked_positions_has_the_loss_of_one_on_every_token(model_type, heads):
    from pretraining_peer import Loop, PeerForm, random_batch

    network, form = tiny_network(model_type, heads), PeerForm("eager", masked=True, tokens=64)
    torch.manual_seed(0)
    batch = random_batch(network, form, 16, 0.15, "cpu")
    loops = [Loop(network, each, "cpu", "fp32") for each in (form, form._replace(sparse=True))]
    for loop in loops:
        loop.model.eval()
    every, masked = (loop.loss(batch).item() for loop in loops)
    assert every == pytest.approx(masked, rel=1e-5)
    labels = batch.labels.flatten()
    assert torch.equal((labels != -100).nonzero()[:, 0], batch.rows_P) and len(batch.rows_P) == 4 * 2
    assert loops[0].take(2, batch) == 2 * 64


def test_padded_batches_give_the_vectors_of_texts_alone(tmp_path):
    from padded_inference import PaddedForm, PaddedPeer

    folder = tmp_path / "model"
    write_toy_folder(folder)
    texts = ["the cat", "the cat sits on the mat and sleeps", "a dog", "the dog walks to the park"] * 2
    peer = PaddedPeer(folder, "cpu", PaddedForm("eager", tokens=24, multiple=4))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = [model(input_ids=torch.tensor(ids)[None]).last_hidden_state for ids in peer.tokens(texts)]
    expected = torch.cat([each.mean(1) for each in states]).numpy()
    np.testing.assert_allclose(peer.of_texts(texts), expected, atol=1e-5)
    np.testing.assert_allclose(peer.of_tokens(peer.tokens(texts)), expected, atol=1e-5)


def test_vectors_are_made_with_a_tokenizer_that_gives_no_segments(tmp_path, monkeypatch):
    from inference_peers import PEERS

    folder, texts = tmp_path / "model", ["the cat", "the cat sits on the mat"]
    write_toy_folder(folder)
    expected = PEERS["transformers fp32"](folder)(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    np.testing.assert_allclose(PEERS["transformers fp32"](folder)(texts), expected, atol=1e-6)


def test_contenders_take_turns_and_the_fastest_form_wins(monkeypatch):
    from rounds import fastest, in_turn, narrowed

    # What was set apart when the tests were loaded stays so: each later search for garbage would walk it.
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    met = []
    rates = in_turn({name: lambda name=name: met.append(name) or 1.0 for name in "ab"}, 3)
    assert met == list("ababab") and {name: len(each) for name, each in rates.items()} == {"a": 3, "b": 3}

    def make(form):
        if "broken" in form:
            raise RuntimeError("no such kernel")
        return lambda: float(form)

    tried: dict[str, float] = {}
    assert fastest(["1", "broken", "1000000"], make, tried) == "1000000"
    assert tried["broken"] == 0.0 and tried["1"] > 0
    with pytest.raises(SystemExit):
        fastest(["broken", "broken too"], make, {})
    assert fastest(["broken"], make, {}) == "broken"  # nothing to choose from: its rounds will tell
    assert narrowed(["a mask", "no mask", "none"], "mask") == ["a mask", "no mask"]
    with pytest.raises(SystemExit, match="in none of a mask; none"):
        narrowed(["a mask", "none"], "graphs")


def test_kernels_are_put_into_classes_and_gaps_are_what_is_left():
    from profile_step import Kernel, class_of, gaps

    assert class_of("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>") == "attention"
    assert class_of("nvjet_tst_128x256_64x4") == class_of("sm90_xmma_gemm_bf16bf16") == "matmul"
    assert class_of("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>") == "optimiser"
    assert class_of("triton_red_fused__log_softmax_nll_loss_forward_4") == "loss"
    summed = (
        "void at::native::reduce_kernel<128, 4, sum_functor<float>::operator()::{lambda(float, float)#1}>"
    )
    assert class_of(summed) == "norm and elementwise"
    assert class_of("triton_per_fused__flash_attention_backward_native_layer_norm") == "norm and elementwise"
    kernels = [Kernel("a", 0, 1), Kernel("b", 2, 3), Kernel("beside b", 2.5, 4), Kernel("c", 4.5, 5)]
    assert gaps(kernels) == 1.5
