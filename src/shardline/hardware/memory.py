"""Resident memory of a process, now and at its peak, in bytes.

    rss_bytes(), peak_rss_bytes()            # this process
    rss_bytes(pid), peak_rss_bytes(pid)      # another one

The peak on Linux is the kernel's VmHWM of this address space: `ru_maxrss` would be inherited from
a fat parent across fork and exec. Elsewhere it is `ru_maxrss`, in bytes on macOS and in KiB on the BSDs.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

__all__ = ["peak_rss_bytes", "rss_bytes"]


def rss_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of process `pid` (None: this one); raises `psutil.NoSuchProcess`."""
    return psutil.Process(pid).memory_info().rss


def peak_rss_bytes(pid: int | None = None) -> int:
    """Returns the highest resident memory so far of process `pid` (None: this one).

    For another process on a system without /proc only its present memory is known, and that is returned.
    """
    status = Path(f"/proc/{'self' if pid is None else pid}/status")
    try:
        text = status.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if pid is not None:
        return rss_bytes(pid)
    return max_rss_to_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sys.platform)


def max_rss_to_bytes(ru_maxrss: int, platform: str) -> int:
    """`ru_maxrss` is in bytes on macOS and in KiB everywhere else."""
    return ru_maxrss if platform == "darwin" else ru_maxrss * 1024
