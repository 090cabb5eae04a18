"""A queue in front of a model that doubles numbers, for tests of who is served when."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from bertsmith.core.errors import UserError
from bertsmith.serve.batching import BatchKey, BatchQueue
from bertsmith.serve.server_config import Limits

ONE, OTHER = BatchKey("one"), BatchKey("other")
LIMITS = Limits(batch_tokens=10, queue_tokens=40, queue_requests=8)


class Model:
    """Doubles numbers; refuses those below zero, and breaks at 666."""

    def __init__(self):
        self.asked = []

    def __call__(self, kind, inputs):
        self.asked.append((kind, list(inputs)))
        for number, each in enumerate(inputs):
            if each < 0:
                raise UserError("is negative", index=number)
            if each == 666:
                raise RuntimeError(f"secret {each}")
        return [2 * each for each in inputs]


def run(say, *, limits=LIMITS, on_batch=lambda report: None, model=None):
    """What comes of talking to a queue; and what its model was asked."""
    model = model or Model()

    async def main():
        with ThreadPoolExecutor(1) as thread:
            steps = {"in_steps": model.in_steps} if hasattr(model, "in_steps") else {}
            return await say(BatchQueue(model, thread, limits=limits, on_batch=on_batch, **steps))

    return asyncio.run(main()), model.asked
