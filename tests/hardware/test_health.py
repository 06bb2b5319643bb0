"""The health of packages, asked of real servers on this machine, and without any."""

from __future__ import annotations

import datetime
import json
import os
import time
import venv

import pytest

from hardware.package_server import package_server, project
from hardware.recorded import machine
from shardline.cli.main import main
from shardline.hardware import package_index
from shardline.hardware.health import find_health, health_table, judge
from shardline.hardware.machine import write_machine
from shardline.hardware.package_index import (
    Index,
    IndexSilentError,
    Release,
    find_index,
    parse_pip_config,
    read_release,
)

TODAY = datetime.date(2026, 12, 1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    """Neither this user's cache nor pip's settings count."""
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in [name for name in os.environ if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def files(version: str, uploaded: str) -> dict:
    return project("lively", (f"lively-{version}-py3-none-any.whl", uploaded))


def test_the_last_release_counts_all_files_but_yanked_ones_and_pre_releases():
    answer = project(
        "torch",
        ("torch-2.9.0-cp311-cp311-win_amd64.whl", "2026-01-15T10:00:00Z"),
        ("torch-2.10.0.tar.gz", "2026-02-20T10:00:00.123456Z"),
        ("torch-2.8.1-cp311-cp311-macosx_11_0_arm64.whl", "2026-03-01T10:00:00Z"),
        ("torch-2.11.0-py3-none-any.whl", "2026-04-01T10:00:00Z", "broken"),
        ("torch-2.12.0rc1-py3-none-any.whl", "2026-05-01T10:00:00Z"),
        ("torch-2.12.0.dev20260501.tar.gz", "2026-05-02T10:00:00Z"),
        ("torch-0.1-py2.egg", "2026-06-01T10:00:00Z"),
        ("torch-2.13.0-py3-none-any.whl", None),
    )
    assert read_release(answer) == Release(version="2.8.1", date=datetime.date(2026, 3, 1))
    assert read_release(project("torch", ("torch-2.13.0-py3-none-any.whl", None))) is None
    assert read_release(project("torch")) is None


@pytest.mark.parametrize(
    ("uploaded", "verdict"),
    [
        ("2026-11-30", "active"),
        ("2026-06-05", "active"),
        ("2026-06-04", "slow"),
        ("2025-06-09", "slow"),
        ("2025-06-08", "unmaintained"),
    ],
)
def test_the_verdict_goes_by_the_age(uploaded, verdict):
    with package_server(files("1.0", f"{uploaded}T00:00:00Z")) as server:
        (found,) = find_health(["lively"], find=lambda: Index(url=server.url), today=TODAY)
    assert found.verdict == verdict
    assert found.last_release == uploaded
    assert uploaded in found.reason
    assert found.checked == "index of 2026-12-01"


def test_the_index_s_own_word_and_a_citation_stand_above_the_age():
    with package_server(
        project("lively", ("lively-1.0.tar.gz", "2026-11-01T00:00:00Z"), status="archived"),
        project("torch-xla", ("torch_xla-2.10.0-py3-none-any.whl", "2026-11-20T00:00:00Z")),
    ) as server:
        archived, cited = find_health(["lively", "torch-xla"], find=lambda: Index(url=server.url), today=TODAY)
    assert archived.verdict == cited.verdict == "unmaintained"
    assert "archived" in archived.reason
    assert "pytorch/xla issues 9752 and 9684" in cited.reason
    assert cited.last_version == "2.10.0"


def test_an_answer_is_kept_for_a_day():
    with package_server(files("1.0", "2026-11-01T00:00:00Z")) as server:
        index = Index(url=server.url)
        assert index.last_release("lively") == index.last_release("lively")
        assert [name for name, _ in server.asked] == ["lively"]
        assert "application/vnd.pypi.simple.v1+json" in server.asked[0][1]
        (kept,) = (package_index.cache_dir() / "package-index").glob("*/lively.json")
        values = json.loads(kept.read_text())
        kept.write_text(json.dumps({**values, "asked": time.time() - package_index.KEPT_S - 1}))
        index.last_release("lively")
        assert len(server.asked) == 2
    assert index.last_release("lively").version == "1.0", "the server is gone, the answer is not"
    kept.write_text("{half")
    with pytest.raises(IndexSilentError, match="can't be reached"):
        index.last_release("lively")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"html": True}, "speaks HTML only"),
        ({"code": 500}, "answered 500"),
        ({"password": "secret"}, "answered 401"),
        ({"delay_s": 1.5}, "can't be reached"),
        ({"drip": True}, "no whole answer within 0.4 s"),
    ],
)
def test_an_index_that_does_not_tell(options, says):
    with package_server(files("1.0", "2026-11-01T00:00:00Z"), **options) as server:
        with pytest.raises(IndexSilentError, match=says):
            Index(url=server.url, timeout_s=0.4).last_release("lively")
        with pytest.raises(IndexSilentError, match=r"has no absent|" + says):
            Index(url=server.url, timeout_s=0.4).last_release("absent")


def test_without_an_index_the_table_speaks_with_its_date():
    (torch, unheard_of) = find_health(["torch", "unheard-of"], find=lambda: None, today=TODAY.replace(year=2031))
    assert torch.verdict == "active", "judged by its age when the table was made"
    assert torch.checked == f"table of {health_table().checked}"
    assert (unheard_of.verdict, unheard_of.age) == ("unknown", "")


def test_a_silent_index_keeps_nobody_waiting():
    with package_server(files("1.0", "2026-11-01T00:00:00Z"), delay_s=3.0) as server:
        started = time.monotonic()
        found = find_health(["torch", "lively"], find=lambda: Index(url=server.url), deadline_s=0.3)
        assert time.monotonic() - started < 1.5
    assert [each.checked for each in found] == [f"table of {health_table().checked}", ""]


def test_one_package_that_fails_leaves_the_others():
    with package_server(files("1.0", "2026-11-01T00:00:00Z")) as server:
        lively, torch = find_health(["lively", "torch"], find=lambda: Index(url=server.url), today=TODAY)
    assert lively.checked == "index of 2026-12-01"
    assert torch.checked.startswith("table of")


def test_the_index_is_the_one_that_pip_uses(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_CERT", "/certificates.pem")
    monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:8")
    found = find_index()
    assert (found.url, found.certificates, found.proxy) == (
        "http://127.0.0.1:9/simple/",
        "/certificates.pem",
        "http://127.0.0.1:8",
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert find_index() is None
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_INDEX_URL")
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://127.0.0.1:7/everything\n[install]\nindex-url = http://127.0.0.1:6/in\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert find_index().url == "http://127.0.0.1:6/in"
    config.write_text("[global]\nindex-url = file:///mirror/simple\n")
    assert find_index() is None
    assert find_index(python="/absent/python") is None


@pytest.mark.parametrize("bundled", [True, False], ids=["python has one bundled", "debian has not"])
def test_an_environment_without_pip_still_has_its_settings(tmp_path, monkeypatch, bundled: bool):
    if not bundled:
        monkeypatch.setattr("shardline.hardware.package_index._bundled_pip", lambda: None)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    monkeypatch.setenv("PIP_INDEX_URL", "https://127.0.0.1:5/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1 other.example")
    found = find_index(python=str(tmp_path / "env" / "bin" / "python"))
    assert (found.url, found.trusted) == ("https://127.0.0.1:5/simple", True)


def test_without_a_setting_pip_s_built_in_index_is_used():
    assert find_index().url.startswith("https://")


def test_pip_s_settings_as_it_prints_them():
    text = "global.index-url='https://a.example/simple'\n:env:.timeout='5'\ninstall.cert='x'\n:env:.index-url='https://b.example'\n"
    assert parse_pip_config(text) == {"index-url": "https://b.example", "timeout": "5", "cert": "x"}
    assert parse_pip_config("") == {}


def test_passwords_come_from_the_address_or_from_netrc(tmp_path, monkeypatch):
    with package_server(files("1.0", "2026-11-01T00:00:00Z"), password="s3cret") as server:
        address = server.url.replace("http://", "http://ada:s3cret@")
        assert Index(url=address).last_release("lively").version == "1.0"
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ada password s3cret\n")
        (tmp_path / ".netrc").chmod(0o600)
        assert Index(url=f"{server.url}/").last_release("lively").version == "1.0"
        assert len(server.asked) == 2


def test_a_proxy_is_used():
    with package_server(files("1.0", "2026-11-01T00:00:00Z")) as proxy:
        index = Index(url="http://index.example/simple", proxy=proxy.url.removesuffix("/simple"))
        assert index.last_release("lively").version == "1.0"
        assert proxy.asked


def test_the_table_is_one_that_the_rules_can_use():
    table = health_table()
    assert len({row.package for row in table.rows}) == len(table.rows) >= 20
    for row in table.rows:
        assert row.released <= table.checked
        assert row.verdict in (None, "unmaintained", "slow")
        assert bool(row.verdict) == bool(row.reason) == bool(row.source)
        assert judge(row.package, None, row, today=TODAY).verdict in ("active", "slow", "unmaintained")


def test_the_verb_asks_the_index_unless_told_not_to(tmp_path, monkeypatch, capsys):
    path = tmp_path / "machine.yaml"
    write_machine(machine("healthy-cpu"), path)
    with package_server(project("torch", ("torch-2.16.0.tar.gz", "2024-01-01T00:00:00Z"))) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        assert main(["doctor", "--machine", str(path), "--offline"]) == 0
        assert server.asked == []
        assert main(["doctor", "--machine", str(path)]) == 0
        assert {name for name, _ in server.asked} == {"torch", "transformers", "numpy", "safetensors"}
    output = capsys.readouterr().out
    assert "warn  health        " in output
    assert "torch is unmaintained: the last release, 2.16.0, is of 2024-01-01" in output
