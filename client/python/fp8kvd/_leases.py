"""Which leases are due for renewal, at a third of their time. Knows no thread and no clock."""

from __future__ import annotations

import dataclasses

from fp8kvd.types import Handle


@dataclasses.dataclass
class _Lease:
    period_s: float
    due: float


class Leases:
    """Times are of one clock of the caller, in seconds.

    >>> leases = Leases()
    >>> leases.add(Handle(1, 1, 1, 0), ttl_s=60, now=100)
    >>> leases.next_due(), leases.take_due(now=119), leases.next_due()
    (120.0, [Handle(seq_id=1, generation=1, incarnation=1, home=0)], 139.0)
    >>> leases.add(Handle(2, 1, 1, 0), ttl_s=1.5, now=100)
    >>> leases.patience(5.0)
    0.5
    """

    def __init__(self) -> None:
        self._leases: dict[Handle, _Lease] = {}

    def add(self, handle: Handle, ttl_s: float, now: float) -> None:
        period = max(ttl_s / 3, 1e-3)
        self._leases[handle] = _Lease(period, now + period)

    def drop(self, handle: Handle) -> None:
        self._leases.pop(handle, None)

    def next_due(self) -> float | None:
        leases = list(self._leases.values())  # as in take_due
        return min((lease.due for lease in leases), default=None)

    def patience(self, most: float) -> float:
        """How long a renewal may take: a period of the shortest lease, which waits for it; but a
        quarter of a second at least, for a busy machine."""
        leases = list(self._leases.values())  # as in take_due
        return max(min([most, *(lease.period_s for lease in leases)]), 0.25)

    def take_due(self, now: float) -> list[Handle]:
        """Those that are due or nearly so: sequences made one by one share a call."""
        due = []
        for handle in list(self._leases):  # a finalizer may drop one at any allocation
            lease = self._leases.get(handle)
            if lease is not None and lease.due <= now + lease.period_s / 4:
                lease.due = now + lease.period_s
                due.append(handle)
        return due
