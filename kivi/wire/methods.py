"""The names of the service's methods and how a channel to it is set up: shared by clients and server."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message_factory import GetMessageClass

from kivi.errors import InvalidArgument, Unavailable
from kivi.model.given import is_among, shown
from kivi.wire.v1 import service_pb2 as pb

__all__ = [
    "MESSAGE_BYTES_MAX",
    "METHODS",
    "SERVICE",
    "Tls",
    "channel_options",
    "credentials",
    "messages",
    "metadata",
    "path",
    "read_file",
    "target",
]

SERVICE: Final = "kivi.v1.Kivi"
MESSAGE_BYTES_MAX: Final = 64 << 20  # what both ends tell gRPC; the server publishes it as a limit
HEADER_BYTES_MAX: Final = 4 << 20
"""Of a frame from a client, likewise. Two bytes can be a message, and take the parser some hundred: 200 MB at most."""
DEFAULT_ENDPOINT: Final = "localhost:7420"

METHODS: Final = pb.DESCRIPTOR.services_by_name["Kivi"].methods_by_name


def messages(method: str) -> tuple[Any, Any]:
    """The classes of the message that is sent, and of the one that is returned."""
    found = METHODS[method]
    return GetMessageClass(found.input_type), GetMessageClass(found.output_type)


def path(method: str) -> str:
    return f"/{SERVICE}/{method}"


@dataclass(frozen=True, slots=True)
class Tls:
    """How to speak TLS. Each is the path of a PEM file; ``ca`` None means the system's authorities."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
    """The name in the server's certificate, where it is not the one that is dialled."""


def read_file(name: str) -> bytes:
    """What is in it. Raises InvalidArgument."""
    try:
        with open(name, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgument(f"cannot read {name}: {error.strerror}") from None
    except ValueError:  # a NUL, or half of a character
        raise InvalidArgument(f"cannot read {shown(name)}, which is no path") from None


def as_tls(tls: Tls | bool | str | None) -> Tls | None:
    if tls is None or tls is False:
        return None
    if tls is True:
        return Tls()
    if isinstance(tls, str):
        return Tls(ca=tls)
    if not isinstance(tls, Tls):
        raise InvalidArgument(f"tls is True, the path of a CA file or a kivi.Tls, and not {shown(tls)}")
    return tls


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    files = [None if name is None else read_file(name) for name in (tls.ca, tls.key, tls.cert)]
    return grpc.ssl_channel_credentials(*files)


def target(endpoint: str) -> str:
    """What gRPC connects to: the endpoint, or of several ("a:7420,b:7420") whichever answers, and the next one when
    that one is lost: in this order.

    Raises InvalidArgument for one that is not written as HOST:PORT, Unavailable if no host of them is known.
    """
    if "," not in endpoint:
        return endpoint
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    unknown = ""
    for name in [name.strip() for name in endpoint.split(",")]:
        host, _, port = name.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidArgument(f"{name!r} in {endpoint!r} is no server: write each as HOST:PORT")
        try:
            for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
                ip = str(address[0])
                at = f"{ip}:{port}" if family == socket.AF_INET else f"[{ip}]:{port}"
                if family in found and at not in found[family]:
                    found[family].append(at)
        except OSError as error:
            unknown = f"{host} is not known ({error})"
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if found[family]:
            return f"{scheme}:{','.join(found[family])}"
    raise Unavailable(f"cannot reach {endpoint}: {unknown}")


def channel_options(tls: Tls | None, *, several: bool = False) -> list[tuple[str, int | str]]:
    """``several``: there are other nodes to go to, so one that says nothing any more is left within ten seconds, and
    not half a minute."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        # A server that restarts is found again within a second; one that is slow to greet has gRPC's 20 s to do so
        # (they are called min_reconnect_backoff_ms there: with less, a far or busy server is never reached).
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A peer that vanished without a word is noticed, by pings, of which a server takes one in 5 s. Theirs is the
        # time limit that ends the connection: with the keepalive's alone it was the pings' own one, of a minute.
        ("grpc.keepalive_time_ms", 6_000 if several else 20_000),
        ("grpc.keepalive_timeout_ms", 4_000 if several else 10_000),
        ("grpc.http2.ping_timeout_ms", 4_000 if several else 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Each connect() has its own connection, not a share of another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def metadata(access_token: str | None) -> tuple[tuple[str, str], ...]:
    """Of each call. Raises InvalidArgument for what no header can carry."""
    if access_token is None or is_among(access_token, ("",)):
        return ()
    if not isinstance(access_token, str) or not access_token.isascii() or not access_token.isprintable():
        raise InvalidArgument("access_token is a text of visible ASCII characters, as the server's token file has it")
    return (("authorization", f"Bearer {access_token}"),)
