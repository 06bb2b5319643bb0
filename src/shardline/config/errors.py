"""The exceptions that Shardline raises for its users.

    ValueError
     +-- ShardlineError            exit code 1   something went wrong; nothing that was saved is lost
          +-- UsageError           exit code 2   the command, the config or the request is wrong
          +-- InfeasibleError      exit code 3   it is well-formed, but can't work on this layout or machine

Every message is one sentence or two: what is wrong with the values filled in, and what to do next.
An `assert` in this code base marks a broken invariant of ours, never a user's mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InfeasibleError", "ShardlineError", "UsageError", "nearest"]


class ShardlineError(ValueError):
    """Base of every error meant for a user."""

    exit_code = 1


class UsageError(ShardlineError):
    """A wrong command, config or request."""

    exit_code = 2


class InfeasibleError(ShardlineError):
    """A request that is well-formed and can't be met by the layout or the machine."""

    exit_code = 3


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest choice, or `"; choose one of a, b."` when none is close."""
    options = sorted(choices)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose one of {', '.join(options)}."
