"""A bar while a long append runs: off where nobody looks at it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_LONG_BYTES = 32 << 20


class Progress:
    """Counts bytes up to total; shows them by tqdm where shown is True, or None and the append is
    long, stderr is a terminal, and tqdm is installed."""

    def __init__(self, total: int, shown: bool | None) -> None:
        self._total, self._sent = total, 0
        tqdm = _tqdm(total) if shown is None else importlib.import_module("tqdm") if shown else None
        self._bar: Any = tqdm and tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="append")

    def advance(self, size: int) -> None:
        """More bytes were handed over; what is sent again counts once."""
        step = min(size, self._total - self._sent)
        self._sent += step
        if self._bar is not None:
            self._bar.update(step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm(total: int) -> Any:
    """The module, when a bar of that many bytes is worth showing and can be shown."""
    if total < _LONG_BYTES or not sys.stderr.isatty():
        return None
    try:
        return importlib.import_module("tqdm")
    except ImportError:
        return None
