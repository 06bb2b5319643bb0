"""families.yaml is read strictly and late, a family can be added by an entry, and models/ stays small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardline.models
from shardline.config import ShardlineError, UsageError
from shardline.models.families.family import Key, Row, families, read_families

FOLDER = Path(shardline.models.__file__).parent
TEXT = (FOLDER / "families" / "families.yaml").read_text(encoding="utf-8")

# What is changed in the file, and what the error must say: the family, what is wrong, and where or what was meant.
MISTAKES = {
    "an unknown section": ("shared:\n", "sahred:\n", "'sahred'"),
    "an unknown anchor": ("<<: *gemma2\n", "<<: *gemma9\n", "undefined alias"),
    "an unknown part of an entry": ("    rest: phi3\n", "    rset: phi3\n", "phi3: .*unknown field `rset`"),
    "a missing part": ("    architecture: OPTForCausalLM\n", "", "opt: .*missing required field `architecture`"),
    "an unknown part of a key": ("also: n_embed", "alos: n_embed", "bloom: .*unknown field `alos`"),
    "an unknown part of a row": ("{theirs: fc1,", "{their: fc1,", r"opt: .*`their` - at `\$\.layer\[5\]`"),
    "an unknown op": ("op: qkv_by_head", "op: qkv_by_heed", r"bloom: .*'qkv_by_heed' is not .*'qkv_by_head'\?.*layer"),
    "an unknown field": ("num_kv_heads: {computed", "num_kv_head: {computed", r"gpt2: .*did you mean 'num_kv_heads'\?"),
    "an unknown fixed field": ("{norm: layer,", "{nrom: layer,", r"gpt2: .*did you mean 'norm'\?"),
    "an unknown field in a computation": ("computed: 4 * hidden_size", "computed: 4 * hiden_size", "'hidden_size'?"),
    "an unknown computation": ("computed: 4 * hidden_size", "computed: 4 - hidden_size", "'-' is neither a number nor"),
    "a computation without an end": ("computed: 4 * hidden_size", "computed: 4 *", r"gpt2: '4 \*' is none of A, not A"),
    "an unknown field in a condition": ("when: final_norm", "when: final_nrom", "opt: .*'final_norm'?"),
    "an unknown activation": ("words: {relu: relu", "words: {relu: rleu", "opt: .*'rleu'"),
    "an unknown rope default": ("rope: {theta: ", "rope: {tehta: ", "mixtral: .*'tehta'"),
    "an unknown function": ("rest: chatglm", "rest: chatgml", "chatglm: 'chatgml' is not in REST .*'chatglm'?"),
    "a word for a list": (
        "    skipped: [attn.bias, attn.masked_bias]",
        "    skipped: attn.bias",
        "gpt2: .*Expected `array`, got `str`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_file_is_an_error_that_says_where(name):
    before, after, message = MISTAKES[name]
    assert before in TEXT
    with pytest.raises(ShardlineError, match=message) as error:
        read_families(TEXT.replace(before, after, 1))
    assert str(error.value).startswith("families.yaml (its head says what can be there): ")


def test_the_head_describes_all_that_can_be_there():
    head = TEXT[: TEXT.index("\nshared:")]
    for entry in families().values():
        parts = {*entry.__struct_fields__, *Key.__struct_fields__, *Row.__struct_fields__} - {"model_type"}
        assert not {part for part in parts if not re.search(rf"^#[ a-z,]*\b{part}\b", head, flags=re.MULTILINE)}


ENTRY = """
  small_one:
    <<: *llama
    architecture: SmallOneForCausalLM
    keys:
      <<: *llama-keys
      intermediate_size: {computed: 3 * hidden_size}
      num_experts: {key: n_experts, default: 0}
      experts_per_token: {key: top_k, default: 1}
      expert_size: {key: expert_width, also: ffn_width}
      head_bias: {computed: not tie_word_embeddings}
    fixed: {qkv_bias: true, norm_offset: 1.0}
    layer:
      - {theirs: attn.qkv, ours: [self_attn.q_proj, self_attn.k_proj, self_attn.v_proj], op: qkv, bias: qkv_bias}
      - {theirs: mlp.up_proj, when: not routes}
      - {theirs: "moe.{expert}.w1", ours: "mlp.experts.{expert}.up_proj", when: routes}
      - {theirs: "moe.{expert}.w2", ours: "mlp.experts.{expert}.down_proj", when: routes}
    after:
      - {theirs: head, ours: lm_head, bias: head_bias, when: not tie_word_embeddings}
"""
RAW = {
    "model_type": "small_one",
    "vocab_size": 50,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "n_experts": 2,
    "ffn_width": 8,
}


def test_an_entry_is_all_that_a_family_in_a_known_shape_needs():
    family = read_families(TEXT + ENTRY)["small_one"]
    config = family.read(RAW)
    assert (config.family, config.num_kv_heads, config.head_dim, config.intermediate_size) == ("small_one", 6, 8, 144)
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (2, 1, 8)
    assert (config.qkv_bias, config.norm_offset, config.head_bias, config.norm_eps) == (True, 1.0, True, 1e-6)
    written = family.write(config)
    assert written["architectures"] == ["SmallOneForCausalLM"]
    assert (written["num_key_value_heads"], written["head_dim"], written["expert_width"]) == (None, 8, 8)
    assert {"intermediate_size", "ffn_width", None}.isdisjoint(written)
    assert family.read(written) == config
    assert [(rule.theirs, rule.ours) for rule in family.tensors(config)][:6] == [
        ("model.embed_tokens.weight", ("model.embed_tokens.weight",)),
        *(
            (f"model.layers.0.attn.qkv.{kind}", tuple(f"model.layers.0.self_attn.{x}_proj.{kind}" for x in "qkv"))
            for kind in ("weight", "bias")
        ),
        ("model.layers.0.moe.0.w1.weight", ("model.layers.0.mlp.experts.0.up_proj.weight",)),
        ("model.layers.0.moe.0.w2.weight", ("model.layers.0.mlp.experts.0.down_proj.weight",)),
        ("model.layers.0.moe.1.w1.weight", ("model.layers.0.mlp.experts.1.up_proj.weight",)),
    ]
    assert [rule.theirs for rule in family.tensors(config)][-2:] == ["head.weight", "head.bias"]
    with pytest.raises(UsageError, match="no 'expert_width' or 'ffn_width', which the model_type 'small_one' needs"):
        family.read({key: value for key, value in RAW.items() if key != "ffn_width"})
    with pytest.raises(UsageError, match="hidden_size / num_heads = 48 / 7 is not a whole number"):
        family.read({**RAW, "num_attention_heads": 7})


def test_the_file_is_read_when_it_is_first_needed_and_without_torch():
    code = (
        "import sys; from shardline.models import families; from shardline.models.families.family import families as f;"
        "assert f.cache_info().currsize == 0; assert len(families.FAMILIES) > 10; families.family_of('llama');"
        "assert f.cache_info().misses == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_stay_under_their_line_budget():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.rglob("*.py")}
    assert sum(lines.values()) < 1500, "families are data: what is a table belongs in families.yaml"
