"""What the doctor says of recorded machines: healthy ones, and those with known faults; and of this one."""

from __future__ import annotations

import datetime
import json
import os
import re
import string
import subprocess
import sys

import pytest

from hardware.machines import machine as plain_machine
from hardware.recorded import NAMES, description, machine, values
from shardline.cli.main import VERBS, main
from shardline.config import iter_fields
from shardline.hardware.checks import checks_text, examine, to_json, verdict_of
from shardline.hardware.conditions import holds, names_in, version_key
from shardline.hardware.facts import framework_facts, gpu_facts, machine_facts
from shardline.hardware.health import find_health
from shardline.hardware.lines import LINES
from shardline.hardware.rules import rules

FAULTY = [name for name in NAMES if not name.startswith("healthy-")]
HEALTHY = [name for name in NAMES if name.startswith("healthy-")]


def checks_of(name: str):
    found = machine(name)
    packages = [package for package, version in found.packages.items() if version]
    return examine(found, health=find_health(packages, find=lambda: None))


def test_there_are_enough_machines():
    assert len(FAULTY) >= 15
    assert {description(name)["about"] for name in NAMES}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_of_each_kind_is_ok(name):
    checks = checks_of(name)
    assert {check.verdict for check in checks} == {"ok"}
    assert all(check.facts for check in checks)
    assert {"cores", "memory", "disk", "packages", "frameworks", "health"} <= {check.name for check in checks}


@pytest.mark.parametrize("name", FAULTY)
def test_each_fault_is_found_explained_and_given_its_fix_and_no_other(name):
    found = [check for check in checks_of(name) if check.verdict != "ok"]
    expected = description(name)["expect"]
    assert {check.rule for check in found} == {each["rule"] for each in expected}
    for each in expected:
        said = [check for check in found if check.rule == each["rule"]]
        assert {check.verdict for check in said} == {each["verdict"]}
        assert any(each["reason"] in check.reason for check in said), [check.reason for check in said]
        assert any(each["fix"] in check.fix for check in said), [check.fix for check in said]
        assert all(check.source and "None" not in check.fix + check.reason for check in said)
    worst = "fail" if any(each["verdict"] == "fail" for each in expected) else "warn"
    assert verdict_of(found) == worst


def test_every_rule_is_exercised_by_a_machine():
    exercised = {each["rule"] for name in FAULTY for each in description(name)["expect"]}
    assert exercised == {rule.id for rule in rules()}


def test_rules_are_well_formed():
    found = machine("healthy-h100")
    facts = machine_facts(found)
    own = {
        None: {},
        "gpu": {**gpu_facts(found, facts)[0], "gpus": ""},
        "framework": framework_facts(found)[0],
        "package": find_health(["torch"], find=lambda: None)[0].facts(),
    }
    lines = {name for name, _ in LINES} | {"health"}
    assert len({rule.id for rule in rules()}) == len(rules())
    for rule in rules():
        known = facts.keys() | own[rule.each].keys()
        assert names_in(rule.when) <= known, rule.id
        for template in (rule.sentence, rule.fix):
            assert {field for _, field, _, _ in string.Formatter().parse(template) if field} <= known, rule.id
        assert rule.line in lines, rule.id
        assert rule.source, rule.id
        assert rule.date <= datetime.date.today()


def test_config_keys_and_commands_in_fixes_exist():
    keys = {name for name, _ in iter_fields()}
    verbs = set()
    for rule in rules():
        named = re.findall(r"\b(?:train|parallel|checkpoint|data|model|optimizer)\.[a-z_]+", rule.fix)
        assert set(named) <= keys, rule.id
        verbs |= set(re.findall(r"`shardline (\w+)`", rule.fix))
    assert verbs <= VERBS.keys()


def test_what_is_not_known_accuses_nobody():
    facts = {"known": 3, "version": "12.8", "unknown": None}
    assert holds({"known": {"below": 4, "at_least": 3}}, facts)
    assert not holds({"known": {"below": 3}}, facts)
    assert not holds({"unknown": {"below": 4}}, facts)
    assert not holds({"unknown": {"is_not": 4}}, facts)
    assert not holds({"known": {"below": "$unknown"}}, facts)
    assert holds({"unknown": {"known": False}, "known": {"known": True}}, facts)
    assert holds({"version": {"older_than": "12.10", "at_least_version": "12.8"}}, facts)
    assert version_key("580.65.06") > version_key("580.65")
    with pytest.raises(ValueError, match="there is no test 'smaller'"):
        names_in({"known": {"smaller": 3}})


def test_lines_are_single_ones_and_wrap_under_themselves():
    checks = examine(machine("v100-torch-2.15"))
    lines = checks_text(checks).plain.split("\n")
    assert len(lines) == len(checks)
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    for width in (80, 120):
        wrapped = checks_text(checks, width=width).plain.split("\n")
        longest_word = max(len(word) for check in checks for word in f"{check.reason} {check.fix}".split())
        assert max(map(len, wrapped)) <= max(width, longest_word + 24)
        assert all(line.startswith(("ok", "warn", "fail", "  ")) for line in wrapped)
    assert "-> " in "".join(checks_text(checks, width=80).plain)


def test_a_cpu_limit_is_named():
    limited = plain_machine(num_cores=12, cores_limit="cgroup quota", memory_limit="cgroup")
    cores, memory, *_ = examine(limited)
    assert "12 usable of 16 logical" in cores.facts
    assert "set by cgroup quota" in cores.facts
    assert "set by the cgroup" in memory.facts


def test_facts_of_a_gpu_node():
    facts = {check.name: check.facts for check in examine(machine("healthy-h100"))}
    assert facts["accelerator"] == "2 x NVIDIA H100 80GB HBM3 (cuda, 79.2 GiB, capability 9.0)"
    assert facts["gpus"] == "2 x NVIDIA H100 80GB HBM3, 80 GiB, Hopper 9.0: bf16, fp8, FlashAttention 2/3/4"
    assert facts["topology"] == "1 pair by NV18"
    assert "cuDNN 9.15.1, NCCL 2.28.9" in facts["torch"]
    assert "vllm 0.33.0" in facts["frameworks"]


def test_the_verb_looks_at_this_machine(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path))
    code = main(
        ["doctor", "--offline", "--json", "--disk", str(tmp_path / "runs"), "--record", str(tmp_path / "m.yaml")]
    )
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    names = [check["name"] for check in result["checks"]]
    assert {"cores", "memory", "disk", "matmul", "accelerator", "torch", "packages", "health"} <= set(names)
    assert code == (1 if result["verdict"] == "fail" else 0)
    assert result["matmul_gflops"] > 0.1
    assert result["machine"]["disk_path"] == str(tmp_path)
    dtypes = {each["dtype"]: each for each in result["machine"]["matmuls"] if each["device"] == "cpu"}
    assert {"float32", "bfloat16", "float16", "float64", "int8"} <= dtypes.keys()
    assert all((each["gflops"] or 0) > 0 or each["error"] for each in dtypes.values())
    assert len(captured.err.splitlines()) == len(names)
    assert main(["doctor", "--offline", "--json", "--machine", str(tmp_path / "m.yaml")]) == code
    again = json.loads(capsys.readouterr().out)
    assert again["machine"] == result["machine"]
    assert again["checks"] == result["checks"]


def test_the_verb_judges_a_recorded_machine(capsys, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(values("h100-memory-errors")))
    assert main(["doctor", "--offline", "--machine", str(path)]) == 1
    output = capsys.readouterr().out
    assert "fail  gpus" in output
    assert "GPU 1 (NVIDIA H100 80GB HBM3) has had 3 uncorrected memory errors" in output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--machine", "absent.yaml"], "Can't read the machine description absent.yaml"),
        (["--machine", "typo.yaml"], "Unknown key 'num_core'; did you mean 'num_cores'?"),
        (["--machine", "deep.yaml"], "Unknown key 'drivr' in nvidia; did you mean 'driver'?"),
        (["--machine", "words.yaml"], "Expected `int`, got `str`"),
        (["--machine", "broken.yaml"], "broken.yaml is neither YAML nor JSON"),
        (["--machine", "half.yaml"], "missing required field"),
        (["absent"], "there is no absent"),
        (["--run", "absent"], "absent"),
        (["--run", "a", "b"], "MODEL_FOLDER and --run are different questions"),
        (["--run", "a", "--record", "b"], "--record writes this machine's facts"),
        (["--record", "/dev/null/x"], "Can't write /dev/null/x"),
    ],
)
def test_bad_input_is_a_sentence(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    facts = values("healthy-h100")
    for name, change in {
        "typo": {"num_core": 1},
        "deep": {"nvidia": {"drivr": "1"}},
        "words": {"num_cores": "two"},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**facts, **change}))
    (tmp_path / "broken.yaml").write_text("{: [")
    (tmp_path / "half.yaml").write_text("num_cores: 2")
    assert main(["doctor", "--offline", *words]) == 2
    error = capsys.readouterr().err
    assert text.lower() in error.lower()
    assert "Traceback" not in error


def test_a_torch_that_can_t_be_imported_is_a_line_and_no_traceback(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "shardline", "doctor", "--offline", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SHARDLINE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert [check["rule"] for check in result["checks"] if check["verdict"] == "fail"] == ["torch-import-fails"]
    assert "OSError: libcudart.so.13" in done.stderr
    assert "Traceback" not in done.stderr


def test_checks_as_json():
    keys = {"name", "verdict", "facts", "reason", "fix", "rule", "source"}
    assert set(to_json(examine(machine("healthy-cpu")))[0]) == keys
