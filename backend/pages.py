"""Large pages for the weights: a round on a CPU streams all of them, and small pages cost it a tenth of its time.

Linux gives 2 MB pages to memory that asks for them. torch asks for single tensors of 2 MB or more at most, and its
prepacked weights are smaller than that, many behind one another; so what is large and in use is asked for as a whole.
Sources: madvise(2), proc_pid_smaps(5).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = 2 << 20
_ADVISE_HUGE, _COLLAPSE = 14, 25  # madvise(2): MADV_HUGEPAGE; MADV_COLLAPSE, which does it now (Linux 6.1)
_IN_USE = 0.5  # of a mapping: sparse ones would grow


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Writable memory of this process alone, without a file: [start, end), and how many bytes of it are in use."""

    start: int
    end: int
    used: int


def use_large_pages() -> int:
    """Move what lies in memory now to large pages where the system can; how many bytes were asked for.

    Left alone: memory that asked for small pages (keys and values), mappings that are half empty, other systems.
    """
    try:
        if "[never]" in _ENABLED.read_text():
            return 0  # MADV_COLLAPSE would not ask
        smaps = _SMAPS.read_text()
    except OSError:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    asked = 0
    for mapping in _mappings(smaps):
        start, end = -(-mapping.start // _HUGE) * _HUGE, mapping.end // _HUGE * _HUGE
        if end <= start or mapping.used < _IN_USE * (mapping.end - mapping.start):
            continue
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        if libc.madvise(address, size, _ADVISE_HUGE) == 0:  # a kernel without them says no, and small pages stay
            libc.madvise(address, size, _COLLAPSE)
            asked += end - start
    return asked


def _mappings(smaps: str) -> Iterator[_Mapping]:
    """Private writable memory without a file, in the text of /proc/PID/smaps; not what refused large pages."""
    start = end = used = 0
    private = False
    for line in smaps.splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):  # "7f10-7f20 rw-p 00000000 00:00 0   [heap]"
            first, _, last = key.partition("-")
            start, end, used = int(first, 16), int(last, 16), 0
            fields = rest.split()
            name = fields[4] if len(fields) > 4 else ""
            private = fields[0] == "rw-p" and name in ("", "[heap]")
        elif key == "Rss:":
            used = int(rest.split()[0]) << 10
        elif key == "VmFlags:" and private and "nh" not in rest.split():
            yield _Mapping(start, end, used)
