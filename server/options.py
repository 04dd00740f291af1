"""What ``kivi serve`` can be told: by flags, by the environment and by one file, in this order of precedence.

::

    kivi serve --data /var/lib/kivi --listen 0.0.0.0:7420 --set cache_bytes=256MiB
    KIVI_DATA=/var/lib/kivi KIVI_LISTEN=0.0.0.0:7420 KIVI_STORE_CACHE_BYTES=256MiB kivi serve
    kivi serve --config kivi.toml

        data = "/var/lib/kivi"
        listen = "0.0.0.0:7420"
        [store]
        cache_bytes = "256MiB"

``kivi serve --print-settings`` says what is in force and where each value is from, as such a file. A name that is not
known is refused, wherever it is: a setting that was misspelt would otherwise be a default that nobody chose. The
store's settings are those of ``kivi.runtime.settings``; sizes and times may have their unit (64MiB, 30s).

Light: the command line reads this before it knows what it will do.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, get_args, get_type_hints

from kivi_server.logs import FORMATS

from kivi.errors import InvalidArgument
from kivi.runtime.settings import Settings

__all__ = ["Options", "add_arguments", "host_and_port", "options_of", "printed", "size_of"]


def _told(metavar: str, text: str, default: Any = None) -> Any:
    """A field of ``Options``, and how the command line describes it."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True, slots=True)
class Options:
    """What a server was told. ``source`` says of each name, ``store.<name>`` for settings, where its value is from."""

    data: str = _told("DIR", "the store's directory; created if it is missing", MISSING)
    listen: str = _told("HOST:PORT", "default localhost:7420; port 0 picks a free one", "localhost:7420")
    cluster: str | None = _told(
        "NAME", "be a node of this cluster, whose log NATS JetStream keeps: give --peers or --nats"
    )
    peers: str | None = _told(
        "HOST:PORT,...", "each node runs a server of the log: where these reach one another, alike on every node"
    )
    peer: str | None = _told(
        "HOST:PORT", "which of --peers is this node's; default: the only one at an address of this machine"
    )
    cluster_secret_file: str | None = _told("FILE", "what the servers of --peers know one another by, in one line")
    cluster_ca: str | None = _told(
        "FILE", "the authority of the certificates of the log's servers (PEM): --peers show theirs, --tls-cert"
    )
    nats: str | None = _told("URL[,URL]", "the servers of the log run elsewhere: nats://a:4222,nats://b:4222")
    shards: str | None = _told("0-15,40", "which of the shards 0 to 63 this node holds; default: all that it has")
    verify_every_s: float = _told(
        "SECONDS", "how often nodes compare what they store, by themselves; default 0, which is never", 0.0
    )
    verify_bytes: int = _told("SIZE", "how much of it is read in a second; default 32MiB", 32 << 20)
    log_bytes: int = _told("SIZE", "how large that log may become; default 64GiB", 64 << 30)
    advertise: str | None = _told("HOST:PORT", "where others reach this node; default: what --listen says")
    metrics: str | None = _told("HOST:PORT", "serve Prometheus metrics over HTTP")
    http: str | None = _told(
        "HOST:PORT,...", "serve reads and writes over HTTP: /rows?table=..., /v1/tables (needs kivi[http])"
    )
    http_origins: str | None = _told("ORIGIN,...", "web pages of these may use --http: https://a.example; * is all")
    otlp: str | None = _told("HOST:PORT", "take OpenTelemetry traces by OTLP/gRPC: server spans become events")
    otlp_table: str = _told(
        "NAME", "the event table they go to; default invocations, created if it is missing", "invocations"
    )
    otlp_retention_s: float = _told(
        "SECONDS", "how long it keeps them, if it is created; default 30d, 0 is for ever", 30 * 86_400.0
    )
    otlp_window_s: float = _told("SECONDS", "for how long a span that is sent again is found; default 15m", 15 * 60.0)
    otlp_window_spans: int = _told("N", "span ids held for that, 32 bytes each; default 8000000", 8_000_000)
    otlp_late: str = _told(
        "fail|drop", "spans below the retention floor: told to the sender (default), or only counted", "fail"
    )
    hub: str | None = _told("HOST:PORT", "subscriptions in a process of their own, which listens there")
    tls_cert: str | None = _told("FILE", "the server's certificate chain (PEM)")
    tls_key: str | None = _told("FILE", "its private key (PEM)")
    tls_client_ca: str | None = _told("FILE", "ask clients for a certificate of this authority")
    token_file: str | None = _told("FILE", "access tokens, one a line, each with its access")
    insecure: bool = _told("", "serve plaintext beyond this machine", False)
    metrics_insecure: bool = _told("", "serve the metrics, and them alone, in plaintext beyond this machine", False)
    log_format: str = _told("FORMAT", "text or json, on standard error; default text", "text")
    slow_call_s: float = _told("SECONDS", "calls that take longer are logged; default 1", 1.0)
    client_rate: float | None = _told("N", "requests a second that one client may ask for; default no limit")
    client_snapshots: int | None = _told("N", "snapshots that one client may have open; default no limit")
    client_staged_bytes: int | None = _told("SIZE", "what one client may have staged; default no limit")
    grace_s: float = _told("SECONDS", "for commits in flight, on a stop; default 10", 10.0)
    settings: Settings = field(default_factory=Settings)
    source: Mapping[str, str] = field(default_factory=dict)


_OPTIONS: Final = {each.name: each.metadata for each in fields(Options) if each.metadata}
_KINDS: Final[dict[str, type]] = {
    name: next(iter(get_args(hint)), hint)  # of `float | None` it is float
    for name, hint in get_type_hints(Options).items()
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {"log_format": FORMATS, "otlp_late": ("fail", "drop")}
_SETTINGS: Final = {each.name: each.default for each in fields(Settings)}
_PREFIX, _STORE_PREFIX = "KIVI_", "KIVI_STORE_"
_OF_OTHERS: Final = frozenset(
    f"KIVI_{name}"
    for name in "CI CONFIG ENDPOINT FAIL JOURNAL JOURNAL_ROOT OUTPUT TLS_CA TOKEN".split()  # noqa: SIM905
)
"""Variables that clients, tests and this file's name are told by."""
_OF_CLUSTERS: Final = re.compile(r"KIVI_(SERVICE_|PORT(_|\Z))")
"""Variables that Kubernetes tells every container about a service that is called kivi."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\Z")
_SIZES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\Z")
_TIMES: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, described in _OPTIONS.items():
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        if _KINDS[name] is bool:
            parser.add_argument(flag, dest=name, action="store_const", const="true", help=described["help"])
        else:
            parser.add_argument(flag, dest=name, **described)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the store")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these, and a [store] of settings")
    parser.add_argument("--print-settings", action="store_true", help="print what is in force, as such a file, and end")


def options_of(
    args: argparse.Namespace, environment: Mapping[str, str] | None = None, otherwise: Mapping[str, str] | None = None
) -> Options:
    """``otherwise``: what ``kivi up`` takes where nobody says anything. Raises InvalidArgument for a name that is not
    known or a value that does not fit, saying where it is."""
    environment = os.environ if environment is None else environment
    config = args.config or environment.get("KIVI_CONFIG")
    told = [(name, text, "kivi up") for name, text in (otherwise or {}).items()]
    told += [*(_from_file(config) if config else ()), *_from_environment(environment), *_from_flags(args)]
    values, source = dict[str, Any](), dict[str, str]()
    for name, value, where in told:  # the later one wins, but every one has to be right
        values[name], source[name] = _value(name, value, where), where
    if "data" not in values:
        raise InvalidArgument("which directory? Give --data DIR, KIVI_DATA, or data = in a file named by --config")
    settings = {name.removeprefix("store."): value for name, value in values.items() if name.startswith("store.")}
    given = {name: value for name, value in values.items() if not name.startswith("store.")}
    return Options(**given, settings=Settings.of(settings), source=source)


def _known(name: str, known: Iterable[str], where: str) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise InvalidArgument(f"{where}: there is no setting {name!r}; {hint}")


def _from_flags(args: argparse.Namespace) -> Iterator[tuple[str, Any, str]]:
    for name in _OPTIONS:
        if (text := getattr(args, name)) is not None:
            yield name, text, "its flag"
    for pair in args.set:
        name, _, text = pair.partition("=")
        yield f"store.{_known(name, _SETTINGS, f'--set {pair}')}", text, "--set"


def _from_file(path: str) -> Iterator[tuple[str, Any, str]]:
    try:
        with open(path, "rb") as file:
            given = tomllib.load(file)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}") from None
    store = given.pop("store", {})
    if not isinstance(store, dict):
        raise InvalidArgument(f"{path}: store is a section: write [store] above its settings")
    for name, value in given.items():
        yield _known(name, _OPTIONS, path), value, path
    for name, value in store.items():
        yield f"store.{_known(name, _SETTINGS, path)}", value, path


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for variable, text in environment.items():
        if variable.startswith(_STORE_PREFIX):
            name = variable.removeprefix(_STORE_PREFIX).lower()
            yield f"store.{_known(name, _SETTINGS, variable)}", text, variable
        elif variable.startswith(_PREFIX) and variable not in _OF_OTHERS and not _OF_CLUSTERS.match(variable):
            yield _known(variable.removeprefix(_PREFIX).lower(), _OPTIONS, variable), text, variable


def _value(name: str, value: Any, where: str) -> Any:
    """As its type asks: text may come from anywhere, other types from a file only."""
    setting = name.removeprefix("store.")
    kind: type = _KINDS[name] if setting == name else type(_SETTINGS[setting])
    refused = InvalidArgument(f"{where}: {setting} cannot be {value!r}: {_asked(setting, kind)}")
    if kind is bool:
        text = str(value).lower()
        if text not in ("true", "false"):
            raise refused
        return text == "true"
    if kind is str:
        if not isinstance(value, str) or not value:
            raise refused
        if value not in _CHOICES.get(name, (value,)):
            raise InvalidArgument(f"{where}: {name} is {' or '.join(_CHOICES[name])}, not {value!r}")
        return value
    if isinstance(value, str):
        value = _number(setting, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise refused
    if kind is int and value % 1:
        raise refused
    return kind(value)


def _asked(name: str, kind: type) -> str:
    if kind is bool:
        return "write true or false"
    if kind is str:
        return "write a text"
    unit = ", with a unit if you like, such as 64MiB" if name.endswith("_bytes") else ""
    return "write a number" + (", with a unit if you like, such as 30s" if name.endswith("_s") else unit)


def _number(name: str, text: str) -> int | float | None:
    """None if it is none."""
    text = text.strip()
    if name.endswith("_bytes") and (match := _SIZE.match(text)):
        return float(match[1]) * _SIZES[match[2]]
    if name.endswith("_s") and (match := _TIME.match(text)):
        return float(match[1]) * _TIMES[match[2]]
    try:
        return float(text) if any(c in text for c in ".eE") else int(text.replace("_", ""))
    except ValueError:
        return None


def host_and_port(endpoint: str, flag: str) -> tuple[str, int]:
    """The host as it was written, and the port. Raises InvalidArgument, which names the flag."""
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise InvalidArgument(f"{flag} {endpoint!r} is not host:port")
    return host, int(port)


def size_of(text: str) -> float:
    """A number of bytes: 1073741824, 1GiB. Raises ValueError."""
    match = _SIZE.match(text.strip())
    return float(match[1]) * _SIZES[match[2]] if match else float(int(text))


def printed(options: Options) -> str:
    """All settings in force as a TOML file, each with where it is from."""
    lines = []
    for name in _OPTIONS:
        value = getattr(options, name)
        line = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        lines.append(_with_source(line, options.source.get(name)))
    lines += ["", "[store]"]
    for name in _SETTINGS:
        line = f"{name} = {_toml(getattr(options.settings, name))}"
        lines.append(_with_source(line, options.source.get(f"store.{name}")))
    return "\n".join(lines)


def _with_source(line: str, source: str | None) -> str:
    return f"{line:<44}# {'default' if source is None else 'from ' + source}" if not line.startswith("#") else line


def _toml(value: bool | int | float | str) -> str:
    """TOML writes these as JSON does, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
