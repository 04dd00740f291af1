"""What ``kivi serve`` is told: where each value is from, and that nothing misspelt is passed over."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from kivi_server.__main__ import main as server_main
from kivi_server.options import Options, add_arguments, host_and_port, options_of, printed
from kivi_server.process.serve import open_store

import kivi
from kivi.cli.commands import main as cli_main
from kivi.runtime.settings import Settings
from tests.serverproc import ROOT, ServerProcess


def told(*arguments: str, environment: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(arguments), environment or {})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kivi.toml"
    path.write_text(
        'data = "/from/file"\nlisten = "localhost:1"\ninsecure = true\ngrace_s = 3\n'
        '[store]\ncache_bytes = "1.5GiB"\nlease_ttl_s = 90\nfold_every_s = "250ms"\n'
    )
    return path


def test_a_flag_beats_the_environment_and_that_a_file(config: Path) -> None:
    found = told("--config", str(config))
    assert (found.data, found.listen, found.insecure, found.grace_s) == ("/from/file", "localhost:1", True, 3.0)
    assert (found.settings.cache_bytes, found.settings.lease_ttl_s) == (3 << 29, 90.0)
    assert found.settings.fold_every_s == 0.25
    environment = {"KIVI_LISTEN": "localhost:2", "KIVI_STORE_LEASE_TTL_S": "2m", "KIVI_CONFIG": str(config)}
    found = told(environment=environment)
    assert (found.data, found.listen, found.settings.lease_ttl_s) == ("/from/file", "localhost:2", 120.0)
    found = told("--otlp-window", "20m", environment={**environment, "KIVI_OTLP": "localhost:4317"})
    assert (found.otlp, found.otlp_table, found.otlp_window_s) == ("localhost:4317", "invocations", 1200.0)
    found = told("--listen", "localhost:3", "--set", "lease_ttl_s=7", environment=environment)
    assert (found.listen, found.settings.lease_ttl_s) == ("localhost:3", 7.0)
    assert found.source == {
        "data": str(config),
        "listen": "its flag",
        "insecure": str(config),
        "grace_s": str(config),
        "store.cache_bytes": str(config),
        "store.fold_every_s": str(config),
        "store.lease_ttl_s": "--set",
    }


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {}, ["--data DIR", "KIVI_DATA"]),
        (["--data", "d", "--set", "cache_byte=1"], {}, ["cache_byte", "did you mean cache_bytes"]),
        (["--data", "d", "--set", "cache_bytes=12s"], {}, ["cache_bytes", "12s", "64MiB"]),
        (["--data", "d", "--set", "cache_bytes=1.5"], {}, ["cache_bytes", "1.5"]),
        (["--data", "d", "--set", "lease_ttl_s=nan"], {}, ["lease_ttl_s", "30s"]),
        (["--data", "d", "--set", "lease_ttl_s=1e999"], {}, ["lease_ttl_s"]),
        (["--data", "d", "--set", "lease_ttl_s=-1"], {}, ["lease_ttl_s"]),
        (["--data", "d", "--set", "background=maybe"], {}, ["background", "true or false"]),
        (["--data", "d", "--grace", "soon"], {}, ["grace_s", "soon"]),
        (["--data", "d", "--otlp-late", "ignore"], {}, ["otlp_late is fail or drop, not 'ignore'"]),
        (["--data", "d"], {"KIVI_LISTNE": "x"}, ["KIVI_LISTNE", "did you mean listen"]),
        (["--data", "d"], {"KIVI_STORE_CASH_BYTES": "1"}, ["KIVI_STORE_CASH_BYTES", "cache_bytes"]),
        (["--data", "d", "--config", "/not/there"], {}, ["/not/there", "No such file"]),
    ],
)
def test_what_is_not_known_or_does_not_fit_is_refused(
    arguments: list[str], environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(kivi.InvalidArgument) as error:
        told(*arguments, environment=environment)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('datta = "x"', ["datta", "did you mean data"]),
        ("[store]\ncache = 1", ["'cache'"]),
        ("[stores]\ncache_bytes = 1", ["stores"]),
        ("store = 3", ["[store]"]),
        ("data = 3", ["data cannot be 3", "text"]),
        ('data = ""', ["data cannot be ''"]),
        ('data = "x"\n[store]\nbackground = 1', ["background cannot be 1"]),
        ("data = ", ["is not TOML"]),
    ],
)
def test_a_file_with_a_fault_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text(text)
    with pytest.raises(kivi.InvalidArgument) as error:
        told("--data", "d", "--config", str(path))
    assert all(word in str(error.value) for word in [*words, str(path)]), error.value


def test_variables_of_clients_are_no_concern_of_the_servers() -> None:
    cluster = {"KIVI_SERVICE_HOST": "10.0.0.1", "KIVI_PORT": "tcp://10.0.0.1:7420", "KIVI_PORT_7420_TCP_PORT": "7420"}
    assert told("--data", "d", environment=cluster).listen == "localhost:7420"
    assert told("--data", "d", environment={"KIVI_TOKEN": "x", "KIVI_ENDPOINT": "y", "PATH": "z"}).data == "d"


def test_what_is_printed_is_a_file_that_says_the_same(config: Path, tmp_path: Path) -> None:
    found = told("--config", str(config), "--token-file", 'odd "name"\\\n')
    text = printed(found)
    assert f"from {config}" in text and "# default" in text and "# metrics is not set" in text
    path = tmp_path / "printed.toml"
    path.write_text(text)
    again = told("--config", str(path))
    assert dataclasses.replace(again, source={}) == dataclasses.replace(found, source={})
    assert set(tomllib.loads(text)["store"]) == {each.name for each in dataclasses.fields(Settings)}


def test_the_command_prints_and_opens_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kivi_server", "--data", str(tmp_path / "data"), "--print-settings"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert tomllib.loads(done.stdout)["data"] == str(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("flag", ["--listne", "--metric"])
def test_a_flag_that_is_not_known_is_refused_and_so_is_the_beginning_of_one(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    for program in (
        lambda: server_main(["--data", data, flag, "localhost:0"]),
        lambda: cli_main(["serve", "--data", data, flag, "localhost:0"]),
    ):
        with pytest.raises(SystemExit) as ended:
            program()
        assert ended.value.code == 2 and flag in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_server_runs_as_its_environment_says(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.environment = {"KIVI_STORE_MAX_APPEND_ROWS": "10"}
    with server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
        with pytest.raises(kivi.ResourceExhausted, match="10"):
            db.append("e", [{"ts": i} for i in range(11)])


@pytest.mark.parametrize(
    "endpoint", ["7420", ":7420", "localhost:", "localhost:65536", "localhost:-1", "localhost:\u0661"]
)
@pytest.mark.parametrize("flag", ["--listen", "--otlp", "--metrics", "--http"])
def test_an_address_is_a_host_and_a_port_that_there_can_be(flag: str, endpoint: str) -> None:
    """Refused in one line that names the flag, as everything that ``kivi serve`` was told and cannot do."""
    with pytest.raises(kivi.InvalidArgument, match=f"{flag} .* is not host:port"):
        host_and_port(endpoint, flag)


@pytest.mark.parametrize("flag", ["--listen", "--otlp", "--metrics", "--http"])
def test_a_server_that_is_told_of_no_such_port_says_so(
    tmp_path: Path, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    told_it = ["--data", str(tmp_path / "data"), "--listen", "localhost:0", flag, "localhost:70000"]
    assert server_main(told_it) == 1
    assert f"{flag} 'localhost:70000' is not host:port" in capfd.readouterr().err


def test_a_node_says_whom_it_waits_for_before_it_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nobody(*args: object, **options: object) -> None:
        raise kivi.Unavailable(capfd.readouterr().out)

    monkeypatch.setattr("kivi.cluster.ClusterNode", nobody)
    options = told("--data", "d", "--cluster", "apm", "--nats", "nats://me:secret@a:4222,b:4222")
    with contextlib.ExitStack() as stack, pytest.raises(kivi.Unavailable) as caught:
        open_store(options, stack)
    assert caught.value.message == "connecting to the log of apm at a:4222, b:4222\n"
