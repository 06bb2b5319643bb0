"""Reports without names: what goes, and what looks like a name and stays."""

from __future__ import annotations

import json
import socket

import pytest

from hardware.recorded import machine
from shardline.cli.main import main
from shardline.hardware.machine import read_machine, write_machine
from shardline.hardware.redact import Redactor

REDACTOR = Redactor(
    hosts=["node7.cluster.example", "node8"],
    users=["ada"],
    homes=["/data/people/ada"],
    serials=["1650123456789"],
    versions=["9.10.2.21"],
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("process 7 on node7.cluster.example", "process 7 on <host-1>"),
        ("node7 waits for node8, not for node88", "<host-1> waits for <host-2>, not for node88"),
        ("/data/people/ada/runs and /data/people/adam", "~/runs and /data/people/adam"),
        ("/home/grace/model, /Users/Grace Hopper", "~/model, ~ Hopper"),
        ("owned by ada.", "owned by <user>."),
        ("GPU-7e1c2a4b-1f8d-4d5e-9c3b-0a1b2c3d4e5f", "GPU-<uuid>"),
        ("id 7e1c2a4b-1f8d-4d5e-9c3b-0a1b2c3d4e5f", "id <uuid>"),
        ("00000000:18:00.0 and 02:42:ac:11:00:02", "<pci> and <mac>"),
        ("serial 1650123456789", "serial <serial>"),
        ("http://10.0.0.12:8000/v1", "http://<ip>:8000/v1"),
        ("fe80::42:acff:fe11:2 and 2001:db8:0:0:0:0:2:1", "<ip> and <ip>"),
        ("cuDNN 9.10.2.21, driver 580.65.06, 300.1.1.1", "cuDNN 9.10.2.21, driver 580.65.06, 300.1.1.1"),
        ("at 12:30:45, step 3 of 10, ratio 1:2", "at 12:30:45, step 3 of 10, ratio 1:2"),
        ("torch 2.13.0+cpu at loss.py:59 in forward", "torch 2.13.0+cpu at loss.py:59 in forward"),
    ],
)
def test_names_go_and_versions_stay(text, expected):
    assert REDACTOR.text(text) == expected


def test_common_names_are_no_names():
    redactor = Redactor(hosts=["localhost"], users=["root"], homes=["/"])
    assert redactor.text("run as root on localhost: /etc") == "run as root on localhost: /etc"


def test_values_are_gone_through():
    assert REDACTOR.values({"node8": ["node8", 3, None, ("ada",)]}) == {"node8": ["<host-2>", 3, None, ["<user>"]]}


def test_the_verb_gives_no_names_away(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "machine.yaml"
    write_machine(machine("h100-power-cap"), path)
    assert main(["doctor", "--offline", "--json", "--machine", str(path), "--redact"]) == 0
    output = capsys.readouterr().out
    for name in ("7e1c2a4b", "1650123456789", "00000000:18:00.0"):
        assert name in path.read_text()
        assert name not in output
    gpu = json.loads(output)["machine"]["nvidia"]["gpus"][0]
    assert (gpu["uuid"], gpu["serial"], gpu["bus_id"]) == ("GPU-<uuid>", "<serial>", "<pci>")
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    record, disk = tmp_path / "own.yaml", tmp_path / "runs"
    main(["doctor", "--offline", "--record", str(record), "--redact", "--disk", str(disk)])
    text = record.read_text() + capsys.readouterr().out
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text
    assert read_machine(record).disk_path == "~"
