"""Runs the families' tests and writes docs/models.md: which family passes which check, and how far apart numbers were.

python docs/models_table.py        # about two minutes on one core; exit code 1 when a check fails or is missing
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = (
    "models/test_chatglm.py",
    "models/test_config_keys.py",
    "models/test_decoder.py",
    "models/test_dtypes.py",
    "models/test_presets.py",
    "checkpoints/test_huggingface.py",
    "serving/test_families.py",
    "training/test_families.py",
)

NAMES = {
    "llama": "Llama 1-3.3, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi": "Phi-1.5, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "glm": "GLM-4",
    "glm4": "GLM-4-0414",
    "chatglm": "ChatGLM2, ChatGLM3",
    "gpt2": "GPT-2",
    "opt": "OPT",
    "bloom": "BLOOM",
}

# Column: (what it means, the tests that fill it).
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp32": (
        "logits and last hidden states within 1e-5 of the oracle, over 40 tokens: beyond sliding windows and the "
        "rope's original context",
        (
            "test_logits_equal_transformers_beyond_window_and_original_context",
            "test_logits_and_last_hidden_states_of_bf16_files",
            "test_logits_and_last_hidden_states",
        ),
    ),
    "padded": ("a left-padded batch, within 1e-5", ("test_left_padded_batch",)),
    "packed": (
        "several documents in a row give what each gives alone, within 1e-5",
        ("test_packed_documents_do_not_see_each_other",),
    ),
    "gradients": (
        "the gradient of every parameter, within 1e-4 of its largest entry",
        ("test_gradient_of_every_parameter",),
    ),
    "cached": (
        "greedy tokens of the paged engine, chunked and batched, are the oracle's one by one; their log-probabilities "
        "are the trainer's within 1e-5",
        ("test_greedy_tokens_and_logprobs",),
    ),
    "bf16": (
        "bf16 weights: no further from fp32 than transformers in bf16, and no logit further from its than 5% of the "
        "largest (the number is that share)",
        ("test_bf16_is_as_near_to_fp32_as_transformers",),
    ),
    "bits": (
        "loaded and saved again: the same bits, in fp32 and in bf16",
        ("test_loaded_and_saved_again_is_bit_exact", "test_bf16_files_are_saved_with_their_bits"),
    ),
    "opens": (
        "transformers opens what we save and computes exactly the same",
        ("test_transformers_opens_what_we_save_and_computes_the_same",),
    ),
    "config": (
        "every key of config.json carried through; the keys of transformers 4 and 5 read alike, and both written",
        (
            "test_every_key_of_config_json_is_carried_through",
            "test_old_and_new_keys_are_read_the_same",
            "test_both_styles_are_read_alike",
            "test_both_styles_are_written_whichever_was_read",
            "test_a_missing_key_is_what_transformers_makes_of_it",
        ),
    ),
    "refuses": (
        "keys that change the mathematics and are not understood are errors that name them",
        ("test_what_is_not_understood_is_an_error_that_names_it",),
    ),
    "trains": ("a new model's loss falls in a few steps", ("test_the_loss_falls",)),
    "2 processes": (
        "ZeRO-0 and ZeRO-3 over two processes with accumulation: losses within 1e-5 and gradients within 1e-4 of one "
        "process",
        ("test_two_processes_with_accumulation_equal_one",),
    ),
    "sizes": (
        "the presets have exactly the published numbers of parameters",
        ("test_presets_have_the_published_parameter_counts",),
    ),
}

# transformers has no class for ChatGLM, so that these can't be asked.
IMPOSSIBLE = {("chatglm", "bf16"), ("chatglm", "opens")}

UNCHECKED = """\
## What no oracle could check

- **Published weights.** All models here are small and random. That a real folder computes the same rests on the same
  code, on its names and shapes (each is checked when a folder is loaded) and on its config.json keys.
- **ChatGLM2 and 3.** transformers has no class for them, and the code inside their folders is never run. The oracle is
  a second implementation, in `tests/models/test_chatglm.py`, of what their modeling file is published to compute; a
  misreading that both share would not show.
- **`rope_ratio` of ChatGLM2-6B-32K.** ChatGLM3 and GLM-4 multiply the rope's base by it, and so do we. Other
  implementations divide positions by it for ChatGLM2-6B-32K, whose config.json has the same keys; compare its first
  tokens with a run of its own code before relying on it beyond 8,192 tokens.
- **Load balancing.** The loss of mixtures of experts is counted row by row, so that it is the same for every layout;
  transformers counts it over a whole batch. Both agree where both mean the same: in a batch of one full row.
- **Dropout.** Training never drops anything. `attn_pdrop`, `hidden_dropout` and the like are carried through unused.
- **Ropes that depend on length.** When a generated text passes the original context of a longrope or dynamic rope,
  cached keys keep their old angles, in transformers and here; what a whole forward pass gives from there on differs.
- **Accelerators.** All of this ran on a CPU, against transformers' eager attention.
"""


@dataclass(eq=False)
class Recorder:
    """A pytest plugin: which families each test is about, how it ended, and what it measured."""

    families: dict[str, set[str]] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], list[bool]] = field(default_factory=lambda: defaultdict(list))
    measured: dict[tuple[str, str], float] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list) -> None:
        from models.oracle import CONFIGS

        known = {name: config_class.model_type for name, (config_class, _) in CONFIGS.items()}
        known |= {name: name for name in NAMES}
        for item in items:
            params = item.callspec.params.values() if hasattr(item, "callspec") else ()
            values = [value for value in params if isinstance(value, str)]
            found = {known[value] for value in values if value in known}
            if item.function.__name__.startswith("test_presets_have"):
                found = {_preset_family(values[0])}
            if item.module.__name__.endswith("test_chatglm"):
                found = {"chatglm"}
            self.families[item.nodeid] = found

    def pytest_runtest_logreport(self, report) -> None:
        if report.when != "call" and report.passed:
            return
        function = report.nodeid.rpartition("::")[2].partition("[")[0]
        for column, (_, functions) in COLUMNS.items():
            for family in self.families.get(report.nodeid, ()) if function in functions else ():
                self.outcomes[family, column].append(report.passed)
                for value in (value for name, value in report.user_properties if name.endswith("_logits")):
                    self.measured[family, column] = max(value, self.measured.get((family, column), 0.0))

    def cell(self, family: str, column: str) -> str:
        if (family, column) in IMPOSSIBLE:
            return "-"
        outcomes = self.outcomes[family, column]
        if not outcomes:
            return "missing"
        if not all(outcomes):
            return f"{outcomes.count(False)} of {len(outcomes)} fail"
        value = self.measured.get((family, column))
        number = "" if value is None else f" {value:.1%}" if column == "bf16" else f" {value:.0e}"
        return f"\u2713 {len(outcomes)}{number}"


def _preset_family(name: str) -> str:
    from shardline.models.presets import preset

    return preset(name).family


def page(recorder: Recorder) -> str:
    lines = [
        "# Model families",
        "",
        "Generated by `python docs/models_table.py` from a run of the tests.",
        "",
        "One decoder computes all of these; a family is a table of config keys and tensor names. Each check runs on",
        "small random models made by transformers, in several variants of a family (ropes, windows, biases, ties), and",
        "the number beside a tick is how many tests stand behind it; a second number is the largest difference seen.",
        "",
        "| family | `model_type` | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for family, name in NAMES.items():
        cells = " | ".join(recorder.cell(family, column) for column in COLUMNS)
        lines.append(f"| {name} | `{family}` | {cells} |")
    lines += ["", "## What the columns mean", ""]
    lines += [f"- **{column}**: {meaning}." for column, (meaning, _) in COLUMNS.items()]
    lines += [
        "",
        "A `-` stands where there is nothing to compare with. Tensor ops, rope frequencies, ALiBi slopes, shards,",
        "short tensor names, old buffers and the balance of experts have tests of their own in `tests/models`.",
        "",
    ]
    return "\n".join(lines) + "\n" + UNCHECKED


def main() -> int:
    import pytest

    sys.path.insert(0, str(ROOT / "tests"))
    recorder = Recorder()
    code = pytest.main(
        ["--rootdir", str(ROOT), "-p", "no:cacheprovider", *(str(ROOT / "tests" / module) for module in MODULES)],
        plugins=[recorder],
    )
    text = page(recorder)
    (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")
    print("wrote docs/models.md")
    return 1 if code or "missing |" in text or " fail |" in text else 0


if __name__ == "__main__":
    sys.exit(main())
