"""A folder's tokenizer, and the one renderer that turns a chat into token ids, for training and for serving.

    tokenizer = Tokenizer.load("path/to/model")
    tokenizer.encode("Hello")                                        # no special tokens
    tokenizer.encode_prompt("Hello")                                 # BOS where this tokenizer adds one
    tokenizer.encode_chat(messages, add_generation_prompt=True)      # exactly what the chat template writes
    tokenizer.decode(ids)

Text becomes ids through transformers' fast tokenizer, with no remote code. Ids become text here, from the
bytes of each token: `decode` of a whole sequence and the incremental `Detokenizer` agree by construction.
Two kinds of vocabulary are read: byte-level BPE (GPT-2's alphabet of 256 printable characters) and the
SentencePiece kind (U+2581 for a space, `<0x0A>` for a byte).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardline.config.errors import UsageError
from shardline.text.decoding import TokenDecoding, read_decoding

__all__ = ["CHATML_TEMPLATE", "Tokenizer", "byte_tokenizer"]

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tokenizer:
    """One vocabulary. `eos_token_ids` are all ids that end a reply; `eos_token_id` ends a document."""

    def __init__(
        self, fast_tokenizer: Any, *, extra_eos_token_ids: Iterable[int] = (), name: str = "tokenizer"
    ) -> None:
        """Wraps a transformers fast tokenizer; `name` stands for it in error messages."""
        self.name = name
        self._fast = fast_tokenizer
        self._backend = fast_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.bos_token_id: int | None = fast_tokenizer.bos_token_id
        self.eos_token_id: int | None = fast_tokenizer.eos_token_id
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*extra_eos_token_ids, *own_eos]))
        self.decoding: TokenDecoding = read_decoding(self._backend, name)
        self._prefix_ids = self._find_prefix()

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face folder; `UsageError` for a folder that can't be used."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UsageError(f"There is no folder {folder}; pass the path of a Hugging Face folder.")
        fast, eos_token_ids = _load_fast_tokenizer(folder), _read_eos_token_ids(folder)
        return cls(fast, extra_eos_token_ids=eos_token_ids, name=str(folder))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of `text`; with `add_special_tokens`, also those that are put around it."""
        return self._backend.encode(_scrub(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of each text; all cores take part."""
        encodings = self._backend.encode_batch_fast(list(map(_scrub, texts)), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a plain prompt after the BOS that this tokenizer adds; never two of them."""
        return self._with_prefix(self.encode(text))

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of whole documents, to train on: as a prompt would be, and an EOS at the end."""
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        return [self._with_prefix(ids) + end for ids in self.encode_batch(texts)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, as a `Detokenizer` streams it; bytes that are no UTF-8 become U+FFFD."""
        shown = (id for id in ids if not (skip_special_tokens and self.is_special(id)))
        return self.decoding.join(shown).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the exact bytes of one token, maybe a part of a character; b"" for an id with no token."""
        return self.decoding.token_bytes(id)

    def is_special(self, id: int) -> bool:
        """True for control tokens, such as BOS, EOS and a template's markers, that `decode` leaves out."""
        return id in self.decoding.special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._fast.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; the one named `default` where the folder has several."""
        template = self._fast.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def tool_template(self) -> str | None:
        """The chat template of chats with tools: the one named `tool_use` where there is one."""
        template = self._fast.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Returns what the chat template writes for `messages`, each a dict with `role` and `content`.

        `tools` are functions that the model may call, in OpenAI's form.
        """
        if not self.has_chat_template:
            raise UsageError(
                f"{self.name} has no chat template, so chat messages can't be rendered; "
                "use plain completions, or put a chat_template.jinja in the folder."
            )
        from jinja2.exceptions import TemplateError

        try:
            return self._fast.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            # The template is a program from the folder, the messages are a request: either may be wrong.
            raise UsageError(f"The chat template of {self.name} rejects these messages: {error}.") from error

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the ids of the rendered chat: the template writes the special tokens, nothing adds more."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._without_double_bos(self.encode(text))

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, for runtimes old and new."""
        folder = Path(folder)
        self._fast.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        # transformers 4 and what builds on it know neither this class name nor the list-valued key.
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        for key in ("is_local", "local_files_only", "name_or_path"):
            config.pop(key, None)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def fingerprint(self) -> str:
        """Returns a SHA-256 of all that decides the ids of a text or a chat."""
        decides = [self._backend.to_str(), self.bos_token_id, self.eos_token_ids, self.chat_template]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def _find_prefix(self) -> list[int]:
        """The ids that the tokenizer puts before a text: usually one BOS, or none."""
        bare = self.encode("a")
        full = self.encode("a", add_special_tokens=True)
        starts = (n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare)
        return full[: next(starts, 0)]

    def _with_prefix(self, ids: list[int]) -> list[int]:
        if ids[: len(self._prefix_ids)] != self._prefix_ids:
            return self._prefix_ids + ids
        return self._without_double_bos(ids)

    def _without_double_bos(self, ids: list[int]) -> list[int]:
        doubled = self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer of bytes 0..255, then <|endoftext|>, <|im_start|> and <|im_end|>, the EOS."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    from shardline.text.decoding import BYTE_OF_CHARACTER

    backend = Backend(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    return Tokenizer(fast, name="the byte tokenizer")


def _load_fast_tokenizer(folder: Path) -> Any:
    needs_code = "AutoTokenizer" in (_read_json(folder / "tokenizer_config.json").get("auto_map") or {})
    if needs_code and not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"The tokenizer of {folder} needs code from that folder, which Shardline never runs; "
            "save it as a tokenizer.json with transformers' save_pretrained, where you trust the code."
        )
    files = ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"]
    if not any((folder / name).is_file() for name in files):
        raise UsageError(f"{folder} has no tokenizer: none of {', '.join(files)} is there.")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Where tokenizer.json is there, it is the truth: AutoTokenizer of transformers 5 builds another tokenizer from its
    # vocabulary for some classes and model types (Llama, Qwen2), which may cut the same text into other tokens.
    has_json = (folder / "tokenizer.json").is_file()
    loader = PreTrainedTokenizerFast if has_json else AutoTokenizer
    try:
        fast = loader.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # foreign files; the Rust library raises bare Exception
        text = " ".join(str(error).split())
        raise UsageError(f"Can't read the tokenizer of {folder}: {text[:300]}") from error
    if not getattr(fast, "is_fast", False):
        raise UsageError(f"The tokenizer of {folder} has no tokenizer.json form; save one with transformers.")
    return fast


def _read_eos_token_ids(folder: Path) -> list[int]:
    """The EOS ids of generation_config.json, then of config.json; each holds a number or a list of them."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return [id for id in found if isinstance(id, int)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.") from None
    return value if isinstance(value, dict) else {}


def _scrub(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 can't, become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
