"""`inspect`: the facts of a folder without its weights, and one finding for each thing that breaks elsewhere."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.oracle import CONFIGS, save_oracle
from serving.tiny_models import bos_tokenizer, make_decoder, save_tiny_folder, tiny_config
from shardline.checkpoints import portability
from shardline.checkpoints.huggingface import load_decoder, load_tensors, read_config, save_folder
from shardline.checkpoints.inspection import Inspection, inspect_folder
from shardline.checkpoints.stored import INDEX
from shardline.cli.main import main
from shardline.config import ShardlineError, UsageError
from shardline.text.tokenizer import byte_tokenizer


@pytest.fixture(autouse=True)
def _files_for_all():
    earlier = os.umask(0o022)
    yield
    os.umask(earlier)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder without fault: tied, with its own tokenizer and template."""
    return save_tiny_folder(tmp_path / "tiny")


@pytest.fixture
def untied(tmp_path) -> Path:
    return save_tiny_folder(tmp_path / "untied", tie_word_embeddings=False)


def kinds(folder: Path) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in inspect_folder(folder).findings}


def message(folder: Path, kind: str) -> str:
    (found,) = (finding.message for finding in inspect_folder(folder).findings if finding.kind == kind)
    return found


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; None deletes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def shard(folder: Path) -> None:
    """Writes the folder's weights again, in several files with an index."""
    config, tensors = read_config(folder), load_tensors(folder)
    (folder / "model.safetensors").unlink()
    save_folder(folder, config=config, tensors=tensors, max_shard_bytes=120_000)


def edit_index(folder: Path, change) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


def test_a_folder_that_we_write_has_no_findings(folder, untied):
    assert kinds(folder) == {}
    assert kinds(untied) == {}
    shard(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert kinds(folder) == {}


def test_the_facts_of_a_folder(untied):
    found = inspect_folder(untied)
    count, config = found.parameters, tiny_config(byte_tokenizer())
    hidden, layers = config.hidden_size, config.num_layers
    assert found.family == "llama"
    assert found.context_length == 512
    assert count.total == count.active == sum(p.numel() for p in load_decoder(untied).parameters())
    assert count.embedding == count.head == config.vocab_size * hidden
    assert count.attention == layers * 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    assert count.feed_forward == layers * 3 * hidden * config.intermediate_size
    assert count.norms == (2 * layers + 1) * hidden
    assert count.total == count.embedding + count.attention + count.feed_forward + count.norms + count.head
    assert found.stored_elements_by_dtype == {"float32": count.total}
    assert found.weight_bytes == {
        "fp32": 4 * count.total,
        "bf16": 2 * count.total,
        "int8": count.total,
        "int4": count.total // 2,
    }
    assert found.kv_bytes_per_token["bf16"] == 2 * layers * 2 * config.num_kv_heads * config.head_dim
    assert found.kv_bytes_full_context["bf16"] == 512 * found.kv_bytes_per_token["bf16"]
    assert [(each.id, each.text) for each in found.eos] == [(258, "<|im_end|>")]
    assert found.eos[0].sources == ("generation_config.json", "config.json", "tokenizer")
    assert found.chat_template_in == ("chat_template.jinja", "tokenizer_config.json")
    assert found.chat.tokens[0] == (257, "<|im_start|>")
    assert "".join(text for _, text in found.chat.tokens) == found.chat.text


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_of_the_oracle_is_counted_and_told_apart(name, tmp_path):
    theirs = save_oracle(name, tmp_path)
    found = inspect_folder(tmp_path)
    count = found.parameters
    assert count.total == sum(parameter.numel() for parameter in theirs.parameters())
    parts = (count.embedding, count.attention, count.feed_forward, count.norms, count.head)
    assert sum(parts) == count.total
    assert found.tied_head == (count.head == 0)
    assert "parameters-differ" not in kinds(tmp_path)


def test_experts_that_a_token_is_not_routed_to_are_not_active(tmp_path):
    theirs = save_oracle("mixtral", tmp_path)
    count = inspect_folder(tmp_path).parameters
    experts = sum(p.numel() for name, p in theirs.named_parameters() if ".experts." in name)
    assert experts > count.total // 3
    assert count.active == count.total - experts // 2, "2 of 4 experts"


def test_layers_with_a_window_keep_fewer_tokens(tmp_path):
    save_oracle("mistral-window", tmp_path)
    found = inspect_folder(tmp_path)
    assert found.num_windowed_layers == found.num_layers == 3
    assert found.kv_bytes_full_context["fp32"] == 5 * found.kv_bytes_per_token["fp32"]


def test_no_weight_is_read(folder):
    """Damage in the numbers themselves goes unseen, since only the headers are read."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path.write_bytes(data)
    assert kinds(folder) == {}


def test_bf16_files_are_told_from_the_header(folder):
    tensors = {name: tensor.bfloat16() for name, tensor in load_tensors(folder).items()}
    save_folder(folder, config=read_config(folder), tensors=tensors)
    assert list(inspect_folder(folder).stored_elements_by_dtype) == ["bfloat16"]
    assert kinds(folder) == {}
    edit(folder / "config.json", dtype="float16", torch_dtype="float16")
    assert "the files hold bfloat16" in message(folder, "dtype-differs")


def _add_differing_head(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1.0}))


def _add_equal_head(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))


def _drop_head(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=False)


def _new_rope_only(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    edit(folder / "config.json", rope_parameters=rope, rope_theta=None, rope_scaling=None)


def _old_rope_only(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters=None, rope_theta=500000.0, rope_scaling=None)


def _smaller_vocabulary(folder: Path, size: int) -> None:
    edit(folder / "config.json", vocab_size=size)
    weight = torch.zeros(size, 64)
    edit_tensors(folder, lambda t: t.update({"model.embed_tokens.weight": weight}))


def _without_format(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path), path)
    path.chmod(0o644)


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)


def _other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def _ghost_in_index(folder: Path) -> None:
    shard(folder)
    edit_index(folder, lambda names: names.update({"model.ghost": next(iter(names.values()))}))


def _left_out_of_index(folder: Path) -> None:
    shard(folder)
    edit_index(folder, lambda names: names.pop("model.norm.weight"))


def _wrong_file_in_index(folder: Path) -> None:
    shard(folder)

    def swap(names: dict[str, str]) -> None:
        other = next(name for name in names.values() if name != names["model.norm.weight"])
        names["model.norm.weight"] = other

    edit_index(folder, swap)


def _lost_shard(folder: Path) -> None:
    shard(folder)
    next(folder.glob("model-00002*")).unlink()


def _two_sets(folder: Path) -> None:
    single = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(single)


def _further_file(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


def _tensor_dropped(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def _no_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)


FAULTS = {
    "index-entry-without-tensor": (_ghost_in_index, "warning", "lists model.ghost"),
    "tensor-without-index-entry": (_left_out_of_index, "warning", "model.norm.weight without an entry"),
    "index-names-wrong-file": (_wrong_file_in_index, "warning", "says that model.norm.weight is in"),
    "weight-file-missing": (_lost_shard, "warning", "names model-00002"),
    "two-sets-of-weights": (_two_sets, "warning", "transformers reads the first"),
    "further-weight-files": (_further_file, "note", "adapter.safetensors is not part"),
    "no-format-in-header": (_without_format, "warning", "model.safetensors does not say"),
    "parameters-differ": (
        _tensor_dropped,
        "warning",
        "109,120 parameters, but config.json describes a model of 109,184",
    ),
    "untied-without-head": (_drop_head, "warning", "tie_word_embeddings = false"),
    "tied-head-differs": (_add_differing_head, "warning", "lm_head.weight is stored and differs from model.embed_"),
    "tied-head-stored": (_add_equal_head, "note", "equal to model.embed_tokens.weight"),
    "rope-in-new-keys-only": (_new_rope_only, "warning", "fall back to theta 10000"),
    "rope-in-old-keys-only": (_old_rope_only, "note", "theta 500000"),
    "dtype-in-one-key-only": (lambda f: edit(f / "config.json", dtype=None), "note", "no dtype"),
    "dtype-differs": (lambda f: edit(f / "config.json", torch_dtype="float16"), "warning", "torch_dtype = 'float16'"),
    "tokenizer-unreadable": (lambda f: (f / "tokenizer.json").write_text("{"), "warning", "Can't read the tokenizer"),
    "tokenizer-larger-than-vocabulary": (
        lambda f: _smaller_vocabulary(f, 258),
        "warning",
        "ids up to 258, but the embedding has 258 rows",
    ),
    "padded-vocabulary": (lambda f: _smaller_vocabulary(f, 264), "note", "264 rows for 259 tokens: 5 ids"),
    "template-missing": (_no_template, "note", "There is no chat template"),
    "template-in-tokenizer-config-only": (lambda f: (f / "chat_template.jinja").unlink(), "note", "only in tokenizer_"),
    "template-in-jinja-file-only": (
        lambda f: edit(f / "tokenizer_config.json", chat_template=None),
        "warning",
        "only in chat_template.jinja",
    ),
    "templates-differ": (_other_template, "warning", "different chat templates"),
    "end-of-turn-is-no-eos": (
        lambda f: edit(f / "generation_config.json", eos_token_id=256),
        "warning",
        "ends a turn with <|im_end|> (258), but generation_config.json has eos_token_id = [256]",
    ),
    "no-eos": (_no_eos, "warning", "No file names an EOS token"),
    "files-for-their-owner-only": (
        lambda f: (f / "model.safetensors").chmod(0o600),
        "warning",
        "model.safetensors has mode 0600",
    ),
}


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_a_fault_is_found_with_its_values(kind, folder):
    spoil, severity, text = FAULTS[kind]
    spoil(folder)
    assert kinds(folder)[kind] == severity
    assert text in message(folder, kind)


def test_the_manual_lists_every_kind_of_finding():
    page = (Path(__file__).parents[2] / "docs" / "folders.md").read_text()
    listed = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page.partition("| kind |")[2]))
    assert listed == {*FAULTS, "double-bos"}
    source = Path(portability.__file__).read_text()
    assert set(re.findall(r'(?:_warning|_note|say)\(\s*"([a-z-]+)"', source)) == listed


def test_a_bos_from_the_template_and_from_the_tokenizer_is_two(tmp_path):
    template = "<|endoftext|>{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    config = tiny_config(byte_tokenizer())
    tensors = make_decoder(config).state_dict()
    for name, source, text in (
        ("once", template, "and the tokenizer adds another"),
        ("twice", "<|endoftext|>" + template, "writes the BOS <|endoftext|> (256) twice"),
    ):
        tokenizer = bos_tokenizer(chat_template=source)
        save_folder(tmp_path / name, config=config, tensors=tensors, tokenizer=tokenizer)
        assert text in message(tmp_path / name, "double-bos")
        ids = [id for id, _ in inspect_folder(tmp_path / name).chat.tokens]
        assert ids[0] == 256
        assert ids[1] != 256, "what Shardline sends has one"
    save_folder(tmp_path / "none", config=config, tensors=tensors, tokenizer=bos_tokenizer(chat_template="{{ 1 }}"))
    assert "double-bos" not in kinds(tmp_path / "none")


def test_what_we_write_can_be_read_as_the_umask_says(tmp_path):
    earlier = os.umask(0o027)
    try:
        folder = save_tiny_folder(tmp_path / "group")
    finally:
        os.umask(earlier)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def test_damage_is_an_error(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ShardlineError, match="truncated or damaged"):
        inspect_folder(folder)
    path.unlink()
    with pytest.raises(ShardlineError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json"):
        inspect_folder(folder)
    with pytest.raises(UsageError, match="neither a model folder"):
        inspect_folder(folder / "absent")


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    model = save_tiny_folder(tmp_path / "run" / "checkpoints" / "step-7" / "model")
    assert inspect_folder(tmp_path / "run").folder == str(model)
    assert inspect_folder(model.parent).folder == str(model)


def test_the_command_line_prints_it_for_people_and_as_one_object(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    edit(folder / "generation_config.json", eos_token_id=256)
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "109,184",
        "tied to the embedding",
        "<|im_end|> 258 (from config.json, tokenizer)",
        '"<|im_start|>" 257',
    ):
        assert text in shown
    assert "warning" in shown
    assert main(["inspect", str(folder), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {field for field in Inspection.__dataclass_fields__ if field != "findings"} | {"warnings"}
    assert found["chat"]["tokens"][0] == {"id": 257, "text": "<|im_start|>"}
    assert [each["kind"] for each in found["warnings"]] == ["end-of-turn-is-no-eos"]
    assert main(["inspect", str(folder / "absent")]) == 2
