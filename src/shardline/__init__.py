"""Shardline: one PyTorch code base from the first training shard to the last served token.

`import shardline` loads no torch; the rooms below import what they need when they are used.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
