"""Where a verb writes for people: standard output, or standard error when `--json` owns standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["make_console"]


def make_console(*, json_mode: bool) -> Console:
    """Returns a rich console; it honours NO_COLOR and prints plain text where the output is no terminal."""
    from rich.console import Console

    return Console(stderr=json_mode, highlight=False, soft_wrap=True)
