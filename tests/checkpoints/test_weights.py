"""Weight files written tensor by tensor have the bytes that safetensors itself writes, and several make one folder."""

from __future__ import annotations

import dataclasses
import json
import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from shardline.checkpoints.huggingface import load_tensors, save_folder
from shardline.checkpoints.weights import WeightFiles
from shardline.models.decoder import Decoder
from shardline.models.families import family_of
from shardline.models.presets import preset

# A family whose files hold ours as they are, one that fuses and interleaves them, and one that transposes.
FAMILIES = ["tiny", "bloom-560m", "gpt2"]


def small_tensors(name: str):
    config = preset(name)
    if name != "tiny":
        heads = 4
        config = dataclasses.replace(
            config, vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=heads,
            num_kv_heads=heads, head_dim=8, sliding_windows=(None, None),
        )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(seed=3)
    return config, {name: parameter.detach() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "mixed"])
def test_a_file_has_the_bytes_of_save_file(name, dtypes, tmp_path):
    config, tensors = small_tensors(name)
    if dtypes != "fp32":
        tensors = {
            key: tensor.bfloat16() if dtypes == "bf16" or "norm" not in key else tensor
            for key, tensor in tensors.items()
        }
    save_folder(tmp_path / "ours", config=config, tensors=tensors)
    theirs = {
        rule.theirs: rule.op.save([tensors[key] for key in rule.ours], config).contiguous()
        for rule in family_of(config.family).tensors(config)
    }
    save_file(theirs, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    written = tmp_path / "ours" / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert stat.S_IMODE(written.stat().st_mode) == 0o666 & ~_umask()


def test_a_large_model_is_several_files_with_an_index(tmp_path):
    config, tensors = small_tensors("tiny")
    limit = 200_000
    save_folder(tmp_path, config=config, tensors=tensors, max_shard_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert max(path.stat().st_size for path in files[1:]) < limit + 4096
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    loaded = load_tensors(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_only_the_tensor_that_is_written_is_asked_for(tmp_path):
    config, tensors = small_tensors("bloom-560m")
    files = WeightFiles.plan(config, tensors, max_shard_bytes=10**9)
    asked: list[tuple[str, ...]] = []

    def read(names):
        asked.append(tuple(names))
        return [tensors[name] for name in names]

    files.write(tmp_path / "model.safetensors", read)
    assert max(map(len, asked)) == 3, "query, key and value become one tensor"
    assert sorted(name for names in asked for name in names) == sorted(tensors)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
