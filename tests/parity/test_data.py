"""The gate's data is uneven enough that a loss with the wrong denominator can't pass for the right one."""

from __future__ import annotations

import numpy as np

from shardline.text.dataset import prepare_dataset
from shardline.text.sampler import sample_rows
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.loss import IGNORED

DATA_RANKS = 4


def test_rows_hold_very_different_numbers_of_targets(base_config, cache, record_property):
    rows, _ = prepare_dataset(base_config.data, byte_tokenizer(), cache_dir=cache)
    train = base_config.train
    chosen = [
        sample_rows(step, global_batch=train.global_batch, num_rows=rows.num_rows, seed=train.seed)
        for step in range(train.steps)
    ]
    batches = [rows.batch(step) for step in chosen]
    targets = np.stack([(batch.targets_BT != IGNORED).sum(1) for batch in batches])
    documents = max(int(batch.documents_BT.max()) for batch in batches) + 1
    ranks = targets.reshape(train.steps, DATA_RANKS, -1).sum(2)
    skew = float((ranks / ranks.mean(1, keepdims=True)).max() - 1)
    length = base_config.data.sequence_length
    record_property(
        "data",
        {
            "rows": targets.size,
            "length": length,
            "fewest": int(targets.min()),
            "most": int(targets.max()),
            "documents": documents,
            "skew": skew,
        },
    )
    assert targets.min() < length - 4
    assert documents > 3
    assert skew > 0.02
