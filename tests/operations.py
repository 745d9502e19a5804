"""Operations of PyTorch as they run, seen by tests that count them."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls `note` with each operation that has run, its positional arguments and its result."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(func, args, out)
        return out
