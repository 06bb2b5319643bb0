from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config import UsageError
from shardline.text import tokenizer as module
from shardline.text.tokenizer import Tokenizer, byte_tokenizer

from .conftest import CORPUS, fast_metaspace, save_bpe

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello \u4e16\u754c"},
]
WRITES_BOS = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
WRITES_NO_BOS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


def transformers_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*CORPUS[:3], "", " ", "\n\n", "a  b", "<|im_end|>x", "\U0001f468\u200d\U0001f469"])
def test_ids_and_text_are_those_of_transformers(bpe: Tokenizer, text: str):
    theirs = transformers_tokenizer(Path(bpe.name))
    assert bpe.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert bpe.encode(text, add_special_tokens=True) == theirs(text).input_ids
    assert bpe.encode_batch([text, "x"]) == [bpe.encode(text), bpe.encode("x")]
    ids = bpe.encode(text)
    for skip in (True, False):
        assert bpe.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_decode_gives_back_every_text(bpe: Tokenizer, byte: Tokenizer, text: str):
    for tokenizer in (bpe, byte):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abthe. \u00e9\u4e16\U0001f600", max_size=20))
def test_decode_agrees_with_the_sentencepiece_kind(metaspace: Tokenizer, text: str):
    fast = fast_metaspace()
    ids = metaspace.encode(text)
    assert metaspace.decode(ids) == fast.decode(ids) == text
    assert metaspace.decode([1, *ids, 2], skip_special_tokens=False) == fast.decode([1, *ids, 2])


def test_the_metaspace_decoder_is_followed_too(metaspace: Tokenizer):
    from tokenizers import decoders

    fast = fast_metaspace(decoder=decoders.Metaspace())
    tokenizer = Tokenizer(fast)
    for text in ("the a", " the", "  a b"):
        ids = [id for id in tokenizer.encode(text) if len(tokenizer.token_bytes(id)) != 0]
        assert tokenizer.decode(ids) == fast.decode(ids)


def test_token_bytes_are_exact(bpe: Tokenizer, metaspace: Tokenizer, byte: Tokenizer):
    assert [byte.token_bytes(id) for id in range(256)] == [bytes([id]) for id in range(256)]
    assert byte.token_bytes(258) == b"<|im_end|>"
    assert metaspace.token_bytes(3 + 0xE4) == b"\xe4"
    assert metaspace.token_bytes(metaspace.encode(" the")[-1]) == b" the"
    assert bpe.token_bytes(0) == b"<|endoftext|>"
    assert bpe.token_bytes(bpe.vocab_size) == b"", "an id of a padded vocabulary has no text"
    assert {len(bpe.token_bytes(id)) for id in range(4, bpe.vocab_size)} > {1, 2, 3}


def test_special_tokens_are_known_and_left_out(bpe: Tokenizer):
    assert [bpe.is_special(id) for id in range(5)] == [True, True, True, True, False]
    ids = bpe.encode("<|im_start|>hi<|im_end|>")
    assert bpe.decode(ids) == "hi"
    assert bpe.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_prompt_gets_the_bos_that_the_tokenizer_adds_once(tmp_path: Path, adds_bos: bool):
    tokenizer = Tokenizer.load(save_bpe(tmp_path, adds_bos=adds_bos))
    expected = [3] if adds_bos else []
    assert tokenizer.encode_prompt("fox") == expected + tokenizer.encode("fox")
    assert tokenizer.encode_prompt("") == expected
    assert tokenizer.encode_prompt("<s>fox") == [3, *tokenizer.encode("fox")], "the text brought its own BOS"
    assert tokenizer.encode_prompt("<s><s>fox") == [3, *tokenizer.encode("fox")]
    assert tokenizer.encode_documents(["fox"]) == [[*expected, *tokenizer.encode("fox"), 2]]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [WRITES_BOS, WRITES_NO_BOS])
def test_a_chat_has_the_bos_that_the_template_writes(tmp_path: Path, adds_bos: bool, template: str):
    folder = save_bpe(tmp_path, adds_bos=adds_bos, chat_template=template)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=True)
    assert ids.count(3) == (1 if template is WRITES_BOS else 0)
    theirs = transformers_tokenizer(folder)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    doubled = [{"role": "user", "content": "x"}]
    tokenizer._fast.chat_template = "{{ bos_token }}" + template
    assert tokenizer.encode_chat(doubled, add_generation_prompt=False)[:2].count(3) == 1


def test_rendering_is_what_transformers_renders(bpe: Tokenizer):
    theirs = transformers_tokenizer(Path(bpe.name))
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False)
        assert bpe.render_chat(CHAT, add_generation_prompt=prompt) == expected
    assert bpe.render_chat(CHAT, add_generation_prompt=True).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_template_is_read_from_either_file(tmp_path: Path, where: str):
    save_bpe(tmp_path, chat_template=None)
    assert not Tokenizer.load(tmp_path).has_chat_template
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(WRITES_NO_BOS)
    else:
        config = json.loads((tmp_path / where).read_text())
        (tmp_path / where).write_text(json.dumps({**config, "chat_template": WRITES_NO_BOS}))
    assert Tokenizer.load(tmp_path).render_chat(CHAT[:1], add_generation_prompt=False) == "[system] Be brief.\n"


def test_a_folder_without_a_template_says_so(tmp_path: Path):
    tokenizer = Tokenizer.load(save_bpe(tmp_path, chat_template=None))
    with pytest.raises(UsageError, match=r"has no chat template.*use plain completions"):
        tokenizer.encode_chat(CHAT, add_generation_prompt=True)


def test_messages_that_the_template_rejects_are_a_usage_error(tmp_path: Path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer.load(save_bpe(tmp_path, chat_template=template))
    with pytest.raises(UsageError, match="roles must alternate"):
        tokenizer.render_chat(CHAT, add_generation_prompt=True)
    with pytest.raises(UsageError, match="rejects these messages"):
        byte_tokenizer().render_chat([{"role": "user", "content": None}], add_generation_prompt=True)


def test_eos_ids_are_the_union_of_three_files(tmp_path: Path):
    save_bpe(tmp_path)
    assert Tokenizer.load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    assert Tokenizer.load(tmp_path).eos_token_ids == (0, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (7, 2, 0)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 3)


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
def test_what_was_saved_loads_to_the_same(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    for text in CORPUS[:3]:
        assert (
            again.encode(text)
            == tokenizer.encode(text)
            == transformers_tokenizer(tmp_path).encode(text, add_special_tokens=False)
        )
        assert again.encode_prompt(text) == tokenizer.encode_prompt(text)
    assert again.eos_token_ids == tokenizer.eos_token_ids
    assert again.vocab_size == tokenizer.vocab_size
    assert again.chat_template == tokenizer.chat_template
    assert again.decoding.special_ids == tokenizer.decoding.special_ids
    if tokenizer.has_chat_template:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert config["chat_template"] == (tmp_path / "chat_template.jinja").read_text() == tokenizer.chat_template
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "the name that transformers 4 knows"
        assert not isinstance(config.get("extra_special_tokens"), list)
        assert again.fingerprint() == tokenizer.fingerprint()


def test_the_byte_tokenizer():
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == (258,)
    assert tokenizer.encode("\u00e9!") == [0xC3, 0xA9, 0x21]
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert [id for id in ids if id > 255] == [257, 258, 257]


def test_lone_surrogates_become_the_replacement_character(bpe: Tokenizer):
    assert bpe.encode("a\ud800b") == bpe.encode("a\ufffdb")
    assert bpe.encode_batch(["\udfff"]) == [bpe.encode("\ufffd")]


def test_fingerprints_differ_with_the_template(tmp_path: Path, bpe: Tokenizer):
    other = Tokenizer.load(save_bpe(tmp_path, chat_template=WRITES_BOS))
    assert other.fingerprint() != bpe.fingerprint()


def test_bad_folders_get_a_sentence(tmp_path: Path):
    with pytest.raises(UsageError, match="There is no folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no tokenizer: none of tokenizer\.json"):
        Tokenizer.load(tmp_path)
    save_bpe(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:1000])
    with pytest.raises(UsageError, match="Can't read the tokenizer of"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"generation_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_code_from_the_folder_is_not_run(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('this code ran')\n")
    with pytest.raises(UsageError, match="needs code from that folder, which Shardline never runs"):
        Tokenizer.load(tmp_path)


def test_other_kinds_of_vocabulary_are_refused():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match=r"WordPiece; Shardline reads byte-level BPE and SentencePiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_importing_the_module_loads_no_transformers():
    code = f"import sys, {module.__name__}; print('transformers' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
def test_tokenizer_json_decides_whatever_the_class_and_the_family(
    kind: str, tokenizer_class: str, model_type: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """transformers' AutoTokenizer rebuilds some of these from the vocabulary alone: other ids for the same text."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": tokenizer_class}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = Tokenizer.load(tmp_path)
    for text in [*CORPUS[:3], "<s> the  12 a"]:
        assert again.encode_prompt(text) == tokenizer.encode_prompt(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
