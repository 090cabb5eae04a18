"""What torch's compiler tells tests: how often it compiled, and what it counted. Private names of torch."""

from torch._dynamo.testing import CompileCounterWithBackend as CompileCounter
from torch._dynamo.utils import counters

__all__ = ["CompileCounter", "counters"]
