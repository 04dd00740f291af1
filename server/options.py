"""What ``kivi serve`` can be told. Light: the command line reads this before it knows what it will do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from kivi.settings import Settings

__all__ = ["Options", "add_arguments", "options_of"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of ``kivi serve``."""

    data: str
    listen: str = "localhost:7420"
    metrics: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    token_file: str | None = None
    insecure: bool = False
    grace_s: float = 10.0
    settings: Settings = field(default_factory=Settings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="DIR", help="the store's directory; created if it is missing")
    parser.add_argument("--listen", default="localhost:7420", metavar="HOST:PORT", help="port 0 picks a free one")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics over HTTP")
    parser.add_argument("--tls-cert", metavar="FILE", help="the server's certificate chain (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    parser.add_argument("--tls-client-ca", metavar="FILE", help="ask clients for a certificate of this authority")
    parser.add_argument("--token-file", metavar="FILE", help="access tokens, one a line, each with its access")
    parser.add_argument("--insecure", action="store_true", help="serve plaintext beyond this machine")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="for commits in flight, on a stop")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="a setting of the store; see kivi/settings.py"
    )


def settings_of(pairs: Sequence[str]) -> Settings:
    values: dict[str, object] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if text.lower() in ("true", "false"):
            values[name] = text.lower() == "true"
            continue
        try:
            values[name] = float(text) if any(c in text for c in ".eE") else int(text)
        except ValueError:
            values[name] = text  # refused with the name by Settings.of
    return Settings.of(values)


def options_of(args: argparse.Namespace) -> Options:
    """Raises InvalidArgument for a setting that is not one."""
    return Options(
        data=args.data,
        listen=args.listen,
        metrics=args.metrics,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
        token_file=args.token_file,
        insecure=args.insecure,
        grace_s=args.grace,
        settings=settings_of(args.set),
    )
