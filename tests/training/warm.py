"""What a training process imports as it goes, imported at once: ranks forked from a server that has it start fast."""

import importlib

from shardline.text.tokenizer import byte_tokenizer

for name in ("shardline.training.run", "torch._dynamo", "torch.distributed.fsdp"):
    importlib.import_module(name)
byte_tokenizer()  # transformers imports its parts when they are used
