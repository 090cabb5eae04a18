"""What a user would pick instead on a CPU, each as a function from texts to mean-pooled vectors."""

import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

Vectors = Callable[[list[str]], np.ndarray]
BATCH = 32
CALIBRATION_TEXTS = 200
CALIBRATION_SEED = 1


def batches(texts: Sequence[str], size: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Texts sorted by length, a batch at a time, with their places."""
    order = np.argsort([-len(text) for text in texts], kind="stable")
    for first in range(0, len(order), size):
        places = order[first : first + size]
        yield places, [texts[place] for place in places]


def pooled(
    forward: Callable[[dict[str, Any]], np.ndarray], folder: Path, *, multiple: int = 1, at_once: int = 1
) -> Vectors:
    """Vectors through any function from padded arrays to hidden states, so many batches at once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    threads = ThreadPoolExecutor(at_once)

    def means_of(group: list[str]) -> np.ndarray:
        padded = tokenizer(group, padding=True, return_tensors="np", pad_to_multiple_of=multiple)
        names = ("input_ids", "attention_mask", "token_type_ids")
        # A tokenizer of a model without segments gives none.
        arrays = {name: padded[name].astype(np.int64) for name in names if name in padded}
        hidden, mask = forward(arrays), arrays["attention_mask"][..., None]
        return np.asarray((hidden * mask).sum(1) / mask.sum(1))

    def vectors(texts: list[str]) -> np.ndarray:
        places, groups = zip(*batches(texts, BATCH), strict=True)
        run = threads.map if at_once > 1 else map
        means = np.concatenate(list(run(means_of, groups)))
        return np.asarray(means[np.argsort(np.concatenate(places))])

    return vectors


def with_transformers(dtype: torch.dtype) -> Callable[[Path], Vectors]:
    """SDPA, length-sorted batches padded to their longest."""

    def make(folder: Path) -> Vectors:
        imitated = not has_bf16()
        if dtype == torch.bfloat16 and imitated:
            raise NotImplementedError("this CPU only imitates bf16")
        model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        model = model.eval()

        def forward(arrays: dict[str, Any]) -> np.ndarray:
            with torch.inference_mode():
                inputs = {name: torch.from_numpy(values) for name, values in arrays.items()}
                return np.asarray(model(**inputs).last_hidden_state.float().numpy())

        return pooled(forward, folder)

    return make


def exported(folder: Path, out: Path) -> Path:
    """The encoder as an ONNX file with free batch and length."""
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, token_type_ids):  # type: ignore[no-untyped-def]
            inputs = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "token_type_ids": token_type_ids,
            }
            return self.model(**inputs).last_hidden_state

    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=2, max=512)
    sample = torch.ones(3, 17, dtype=torch.int64)
    mask = (torch.arange(17) < torch.tensor([[17], [12], [9]])).long()  # with filler, or the mask is left out
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask", "token_type_ids")}
    torch.onnx.export(
        Hidden(),
        (sample, mask, 0 * sample),
        str(out),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=list(shapes),
        output_names=["hidden"],
        verbose=False,
    )
    return out


def with_onnxruntime(*, int8: bool, streams: bool = False) -> Callable[[Path], Vectors]:
    """ONNX Runtime on the CPU, as exported or with its dynamic quantisation per channel.

    With streams, as many batches at once as there are threads, one thread each: none waits for another.
    """

    def make(folder: Path) -> Vectors:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic

        scratch = Path(tempfile.mkdtemp())
        path = exported(folder, scratch / "model.onnx")
        if int8:
            quantize_dynamic(path, scratch / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
            path = scratch / "int8.onnx"
        settings, threads = onnxruntime.SessionOptions(), torch.get_num_threads()
        settings.intra_op_num_threads = 1 if streams else threads
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        at_once = threads if streams else 1
        return pooled(lambda arrays: session.run(["hidden"], arrays)[0], folder, at_once=at_once)

    return make


def with_openvino(precision: str, *, streams: bool = False) -> Callable[[Path], Vectors]:
    """OpenVINO on the CPU in a precision of its own choice, or quantised with nncf.

    With streams, as many batches at once as there are threads, as its guide for throughput advises.
    """

    def make(folder: Path) -> Vectors:
        import openvino

        hint = {"int8": "bf16"}.get(precision, precision) if has_bf16() else "f32"
        threads = torch.get_num_threads()
        at_once = threads if streams else 1
        settings = {
            "INFERENCE_PRECISION_HINT": hint,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": at_once,
        }
        compiled = openvino.Core().compile_model(converted(folder, int8=precision == "int8"), "CPU", settings)
        free = queue.SimpleQueue[Any]()
        for _ in range(at_once):
            free.put(compiled.create_infer_request())

        def forward(arrays: dict[str, Any]) -> np.ndarray:
            request = free.get()
            try:
                return np.array(next(iter(request.infer(arrays).values())))
            finally:
                free.put(request)

        return pooled(forward, folder, at_once=at_once)

    return make


@cache
def converted(folder: Path, *, int8: bool) -> Any:
    """The encoder as OpenVINO takes it, kept for the next side: to calibrate it takes minutes."""
    import openvino

    model = openvino.convert_model(exported(folder, Path(tempfile.mkdtemp()) / "model.onnx"))
    return calibrated(model, folder) if int8 else model


def calibrated(model: Any, folder: Path) -> Any:
    import nncf

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii())
    chance = np.random.default_rng(CALIBRATION_SEED)
    texts = [" ".join(chance.choice(words, chance.integers(5, 60))) for _ in range(CALIBRATION_TEXTS)]

    def arrays(text: str) -> dict[str, Any]:
        return {
            name: values.astype(np.int64) for name, values in tokenizer(text, return_tensors="np").items()
        }

    return nncf.quantize(model, nncf.Dataset(texts, arrays), model_type=nncf.ModelType.TRANSFORMER)


def with_sentence_transformers(folder: Path) -> Vectors:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    words = Transformer(str(folder))
    whole = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
    return lambda texts: np.asarray(whole.encode(texts, batch_size=BATCH, show_progress_bar=False))


def has_bf16() -> bool:
    from bertsmith.model.kernels.torch_internals import has_bf16_products

    return has_bf16_products()


PEERS: dict[str, Callable[[Path], Vectors]] = {
    "transformers fp32": with_transformers(torch.float32),
    "transformers bf16": with_transformers(torch.bfloat16),
    "onnxruntime fp32": with_onnxruntime(int8=False),
    "onnxruntime int8": with_onnxruntime(int8=True),
    "onnxruntime fp32 streams": with_onnxruntime(int8=False, streams=True),
    "onnxruntime int8 streams": with_onnxruntime(int8=True, streams=True),
    "openvino bf16": with_openvino("bf16"),
    "openvino int8": with_openvino("int8"),
    "openvino bf16 streams": with_openvino("bf16", streams=True),
    "openvino int8 streams": with_openvino("int8", streams=True),
    "sentence-transformers": with_sentence_transformers,
}
