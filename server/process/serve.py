"""The server's process: ``kivi serve``.

A graceful stop (SIGTERM or SIGINT) goes in this order: health says NOT_SERVING and nothing new begins;
commits that are in flight are answered; streams end; the store is closed. A second signal ends the
process at once, which loses nothing either: that is what the log is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import importlib.util
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
import pyarrow as pa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from kivi_server import logs, metrics
from kivi_server.auth import Allowance, Tokens
from kivi_server.options import Options, host_and_port
from kivi_server.process.hub import HubProcess, forget_copies
from kivi_server.service import Service, handlers
from kivi_server.sessions import Sessions
from kivi_server.wsgi import serving

from kivi.errors import InvalidArgument, KiviError, StoreInUse, Unavailable
from kivi.runtime.imports import do_without_pandas
from kivi.store.facade import Store
from kivi.wire import methods

if TYPE_CHECKING:
    from kivi_server.http.listener import HttpListener
    from kivi_server.otlp.exports import Exports
    from kivi_server.otlp.listener import Listener
    from prometheus_client.registry import CollectorRegistry

    from kivi.cluster import Certificates, PeerServer

__all__ = ["listener", "open_store", "run"]

_log = logging.getLogger("kivi.server")
_GARBAGE: Final = 20_000  # objects made and not freed yet, before the collector looks at the young ones


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def credentials(options: Options) -> grpc.ServerCredentials | None:
    """TLS, or None for plaintext, which is for loopback unless --insecure says that the network is trusted."""
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InvalidArgument("TLS needs both --tls-cert and --tls-key")
    if options.tls_cert and options.tls_key:
        ca = methods.read_file(options.tls_client_ca) if options.tls_client_ca else None
        pair = (methods.read_file(options.tls_key), methods.read_file(options.tls_cert))
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)
    if options.tls_client_ca:
        raise InvalidArgument("--tls-client-ca needs --tls-cert and --tls-key")
    for flag, endpoint in (
        ("--listen", options.listen),
        ("--otlp", options.otlp),
        ("--hub", options.hub),
        *(("--http", endpoint) for endpoint in _http_endpoints(options)),
    ):
        if endpoint:
            _check_plaintext(flag, endpoint, options)
    return None


def _check_plaintext(flag: str, endpoint: str, options: Options) -> None:
    host, _ = host_and_port(endpoint, flag)
    if not is_loopback(host) and not options.insecure:
        raise InvalidArgument(
            f"{flag} {endpoint} would serve plaintext beyond this machine: "
            "give --tls-cert and --tls-key, or --insecure if the network is trusted"
        )


def _check_metrics(options: Options) -> None:
    """The page is never encrypted and asks for no token."""
    host, _, _ = (options.metrics or "localhost:").rpartition(":")
    if not is_loopback(host) and not (options.insecure or options.metrics_insecure):
        raise InvalidArgument(
            f"--metrics {options.metrics} would serve plaintext beyond this machine, to whoever asks: "
            "give --metrics-insecure if the network is trusted with it"
        )


def _https(options: Options) -> ssl.SSLContext | None:
    """The same TLS for HTTP, or None for plaintext."""
    if not options.http or not options.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if options.tls_client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(options.tls_client_ca)
    except ssl.SSLError as error:
        raise InvalidArgument(f"the certificate, its key or the client's authority cannot be used: {error}") from None
    return context


def _disk(path: str) -> dict[str, int]:
    found = os.statvfs(path)
    return {"disk_free_bytes": found.f_bavail * found.f_frsize, "disk_size_bytes": found.f_blocks * found.f_frsize}


def _bind(server: grpc.aio.Server, endpoint: str, flag: str, secure: grpc.ServerCredentials | None) -> str:
    host, port = host_and_port(endpoint, flag)
    in_use = StoreInUse(f"{flag}: cannot listen on {endpoint}: the address is in use or not this machine's")
    if port and _is_taken(host, port):
        raise in_use
    try:
        if secure is None:
            port = server.add_insecure_port(endpoint)
        else:
            port = server.add_secure_port(endpoint, secure)
    except RuntimeError:
        port = 0
    if port == 0:
        raise in_use
    return f"{host}:{port}"


def _is_taken(host: str, port: int) -> bool:
    """Whether another process listens at one of the host's addresses. gRPC is content with the others, and some of
    those who mean this server would reach that process: ``localhost`` is 127.0.0.1 for a collector, and ::1, too, here.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    probe.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
    return False


def listener(
    sessions: Sessions, options: Options, secure: grpc.ServerCredentials | None, tokens: Tokens, stats: metrics.Stats
) -> tuple[grpc.aio.Server, health.HealthServicer, str]:
    """The gRPC server of these sessions, bound and not started, its health, and its endpoint: host and real port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_send_message_length", methods.MESSAGE_BYTES_MAX),
            ("grpc.max_receive_message_length", methods.MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    server.add_generic_rpc_handlers((handlers(Service(sessions, tokens, stats)),))
    healthy = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    return server, healthy, _bind(server, options.listen, "--listen", secure)


def _intake(options: Options, sessions: Sessions) -> Exports | None:
    """What takes spans; its packages, an extra, are loaded if it is asked for, and for HTTP if they are here."""
    if options.otlp is None and (options.http is None or not _has(_OTLP)):
        return None
    from kivi_server.otlp.exports import Exports

    return Exports(
        sessions,
        options.otlp_table,
        options.otlp_retention_s,
        options.otlp_window_s,
        options.otlp_window_spans,
        drop_late=options.otlp_late == "drop",
    )


def _otlp(options: Options, intake: Exports | None, tokens: Tokens) -> Listener | None:
    if options.otlp is None or intake is None:
        return None
    from kivi_server.otlp.listener import Listener

    return Listener(intake, tokens)


_OTLP: Final = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


def _has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def _http(
    options: Options,
    sessions: Sessions,
    tokens: Tokens,
    page: CollectorRegistry,
    stats: metrics.Stats,
    secure: ssl.SSLContext | None,
    intake: Exports | None,
) -> HttpListener | None:
    """Bound, not started; its packages, an extra, are loaded only if it is asked for."""
    if options.http is None:
        return None
    from kivi_server.http.application import application
    from kivi_server.http.listener import HttpListener

    otlp = None
    if intake is not None:
        from kivi_server.otlp.over_http import OverHttp

        otlp = OverHttp(intake)
    endpoints = _http_endpoints(options)
    is_local = all(is_loopback(host_and_port(endpoint, "--http")[0]) for endpoint in endpoints)
    app = application(sessions, tokens, page, stats, _origins(options), otlp, is_local=is_local)
    return HttpListener(endpoints, "--http", app, secure)


def _http_endpoints(options: Options) -> list[str]:
    return [endpoint.strip() for endpoint in options.http.split(",")] if options.http else []


def _origins(options: Options) -> list[str]:
    return [origin.strip() for origin in (options.http_origins or "").split(",") if origin.strip()]


def _check_http(options: Options) -> None:
    """Before anything is opened. Raises InvalidArgument."""
    for origin in _origins(options):
        if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise InvalidArgument(f"--http-origins: {origin!r} is no origin, such as https://dashboards.example:8443")
    if options.http is None:
        return
    for endpoint in _http_endpoints(options):
        host_and_port(endpoint, "--http")
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise InvalidArgument(
            "--http needs the packages starlette and uvicorn, which are not installed here: pip install 'kivi[http]'"
        )


def _check_otlp(options: Options) -> None:
    """Before anything is opened. Raises InvalidArgument."""
    if options.otlp is None:
        return
    host_and_port(options.otlp, "--otlp")
    if not _has(_OTLP):
        raise InvalidArgument(
            "--otlp needs the package opentelemetry-proto, which is not installed here: pip install 'kivi[otlp]'"
        )


async def _serve(
    store: Store,
    options: Options,
    secure: grpc.ServerCredentials | None,
    https: ssl.SSLContext | None,
    tokens: Tokens,
    listens: Callable[[Options], None],
    each_second: Callable[[metrics.Stats], None],
) -> None:
    allowance = Allowance(options.client_rate, options.client_snapshots, options.client_staged_bytes)
    sessions = Sessions(store, metrics.version_of("kivi"), allowance, slow_call_s=options.slow_call_s)

    def stats() -> dict[str, int | float]:
        spans = intake.stats() if intake is not None else metrics.NO_SPANS
        beside = hub.stats() if hub is not None else {}
        return {**store.stats(), **sessions.stats(), **spans, **beside, **_disk(options.data)}

    intake = _intake(options, sessions)
    otlp = _otlp(options, intake, tokens)
    hub = None if options.hub is None else HubProcess(store, options, sessions.hub.durable.take_over)
    server, healthy, endpoint = listener(sessions, options, secure, tokens, stats)
    registry = metrics.registry(stats, store.histograms, sessions.calls)
    page = contextlib.ExitStack()
    if options.metrics:
        address = page.enter_context(serving(options.metrics, "--metrics", metrics.application(registry)))
        print(f"metrics on {address}/metrics", flush=True)
    http = _http(options, sessions, tokens, registry, stats, https, intake)
    if intake is not None:
        if otlp is not None:
            await intake.open()
        intake.start()
    if http is not None:
        await http.start()
        for address in reversed(http.addresses):
            print(f"http on {address}", flush=True)
        print(f"rows on {http.addresses[0]}/rows", flush=True)
        options = replace(options, http=",".join(address.partition("://")[2] for address in http.addresses))
    if otlp is not None:
        address = _bind(otlp.server, options.otlp or "", "--otlp", secure)
        await otlp.start()
        options = replace(options, otlp=address)
        print(f"otlp on {address}", flush=True)
    if hub is not None:
        sessions.subscriptions_beside = hub.port
        hub.start()
    await server.start()
    for name in ("", methods.SERVICE):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # What a server is made of stays. Left to the collector it would be looked through again and again, for tens of
    # milliseconds that every reader would feel; and what a request leaves behind is hardly ever a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, 20, 20)
    listens(replace(options, listen=endpoint))
    print(f"listening on {endpoint}", flush=True)
    failures: list[str] = []
    watching = asyncio.create_task(_watch(sessions, tokens, stop, failures, lambda: each_second(stats)))
    await stop.wait()

    print("stopping", flush=True)
    await healthy.enter_graceful_shutdown()
    sessions.stopping = True
    if not await sessions.drained(options.grace_s):
        _log.warning("%d commits were not answered in time", sessions.commits_in_flight)
    if hub is not None:
        await loop.run_in_executor(None, hub.stop)
    await loop.run_in_executor(None, sessions.hub.stop)  # whose subscribers learn why
    if otlp is not None:
        await otlp.stop()
    if http is not None:
        await http.stop()
    await server.stop(grace=0.2)
    if intake is not None:
        intake.stop()
    watching.cancel()
    page.close()
    await loop.run_in_executor(None, sessions.close)
    if failures:
        raise Unavailable(f"the store stopped: {failures[0]}; start the server again to recover")


async def _watch(
    sessions: Sessions, tokens: Tokens, stop: asyncio.Event, failures: list[str], each_second: Callable[[], None]
) -> None:
    """Ends sessions whose client has stopped reading or lost its token, and the process if the store has stopped.

    A store whose log could not be synced does not know what is on disk: only opening it again tells.
    """
    generation = tokens.generation
    while True:
        await asyncio.sleep(1.0)
        tokens.refresh()
        if generation != tokens.generation:
            generation = tokens.generation
            sessions.regrant(tokens)
        try:
            sessions.store.check_open()
            if sessions.store.log.stats().get("failed"):
                raise Unavailable("the commit log failed")
        except KiviError as error:
            failures.append(error.message)
            _log.error("the store has stopped, and so does the server: %s", error.message)
            stop.set()
            return
        each_second()
        for session in list(sessions.live.values()):
            if session.stalled():
                sessions.dropped += 1
                session.drop(Unavailable("this client accepted no answer for too long"))


def _give_memory_back() -> None:
    """Arrow's default allocator keeps what threads have freed for these threads: 60 MiB more in a long tail."""
    with contextlib.suppress(NotImplementedError):  # where Arrow was built without it
        pa.set_memory_pool(pa.jemalloc_memory_pool())


def _check_cluster(options: Options) -> None:
    """Before anything is opened. Raises InvalidArgument."""
    if options.cluster is None:
        for flag, told in (("--nats", options.nats), ("--peers", options.peers)):
            if told is not None:
                raise InvalidArgument(f"{flag} is for a node of a cluster: give --cluster NAME, too")
    elif (options.nats is None) == (options.peers is None):
        raise InvalidArgument(
            "a node of a cluster needs either --peers HOST:PORT,... or, where the servers of its log run elsewhere, "
            "--nats URL,..."
        )
    for flag, told in (("--peer", options.peer), ("--cluster-secret-file", options.cluster_secret_file)):
        if told is not None and options.peers is None:
            raise InvalidArgument(f"{flag} is for a node that runs a server of the log: give --peers, too")
    if options.cluster_ca is not None and options.cluster is None:
        raise InvalidArgument("--cluster-ca is for a node of a cluster: give --cluster NAME, too")
    if options.cluster_ca is not None and options.peers is not None and options.tls_cert is None:
        raise InvalidArgument(
            "with --cluster-ca the --peers show one another a certificate: give --tls-cert and --tls-key"
        )
    if options.shards is not None and options.cluster is None:
        raise InvalidArgument("--shards is for a node of a cluster: give --cluster NAME, too")
    if options.verify_bytes < 1 or options.verify_every_s < 0:
        raise InvalidArgument("--verify-bytes is at least 1, and --verify-every at least 0, which is never")
    if options.cluster is None:
        return
    try:
        importlib.import_module("nats")
    except ImportError:
        raise InvalidArgument(
            "--cluster needs the package nats-py, which is not installed here: pip install 'kivi[cluster]'"
        ) from None


def open_store(options: Options, stack: contextlib.ExitStack) -> tuple[Store, Callable[[Options], None]]:
    """The store, which ``stack`` closes with what it stands on; and whom to tell where it listens: the options, with
    the ports that are real."""
    if options.cluster is None:
        store = Store.open(options.data, settings=options.settings)
        stack.callback(store.close)
        forget_copies(options.data)
        return store, lambda options: None
    from kivi.cluster import ClusterNode

    about = {"address": options.advertise or "", "version": metrics.version_of("kivi")}
    own = None if options.peers is None else _log_server(options, options.cluster, options.peers, stack)
    if own is None:  # it may take a minute to know that nobody is there
        at = [url.rpartition("@")[2].rpartition("/")[2] for url in (options.nats or "").split(",")]  # and no password
        print(f"connecting to the log of {options.cluster} at {', '.join(at)}", flush=True)
    node = ClusterNode(
        options.data,
        options.cluster,
        [own.url] if own is not None else (options.nats or "").split(","),
        about=about,
        settings=options.settings,
        log_bytes=options.log_bytes,
        copies=None if own is None else own.copies,
        shards=options.shards,
        verify_every_s=options.verify_every_s or None,
        verify_bytes=options.verify_bytes,
        login=_login(options) if own is None else own.login,
        own_server=None if own is None else own.server,
    )
    stack.callback(node.close)

    def listens(options: Options) -> None:
        node.about["address"] = options.advertise or options.listen

    return node.store, listens


def _login(options: Options) -> dict[str, Any]:
    """Of servers that run elsewhere; who one is may be in their URLs. Raises InvalidArgument."""
    from kivi.cluster import trusting

    if options.cluster_ca is None:
        return {}
    return {"tls": trusting(options.cluster_ca, options.tls_cert, options.tls_key)}


def _certificates(options: Options, own: str) -> Certificates | None:
    from kivi.cluster import Certificates, address_of

    if options.cluster_ca is None or options.tls_cert is None or options.tls_key is None:
        return None
    return Certificates(options.cluster_ca, options.tls_cert, options.tls_key, address_of(own)[0])


def _log_server(options: Options, cluster: str, peers: str, stack: contextlib.ExitStack) -> PeerServer:
    """This node's server of the log, once enough of its peers are there. Raises InvalidArgument, Unavailable,
    StoreInUse."""
    from kivi.cluster import PeerServer, own_peer, peers_of, secret_of

    addresses = peers_of(peers)
    if not all(is_loopback(peer.rpartition(":")[0]) for peer in addresses):
        if options.cluster_secret_file is None:
            raise InvalidArgument(
                "--peers beyond this machine need a secret that all of them know: give --cluster-secret-file "
                "(openssl rand -hex 32 makes one)"
            )
        if options.cluster_ca is None and not options.insecure:
            raise InvalidArgument(
                "what --peers tell one another would not be encrypted: give --cluster-ca, --tls-cert and --tls-key, or "
                "--insecure if the network is trusted"
            )
    secret = None if options.cluster_secret_file is None else secret_of(options.cluster_secret_file)
    own = own_peer(addresses, options.peer)
    tls = _certificates(options, own)
    server = PeerServer(options.data, cluster, addresses, own, secret, log_bytes=options.log_bytes, tls=tls)
    signal.signal(signal.SIGTERM, _interrupted)  # until the loop has handlers of its own
    stack.callback(server.stop)
    server.start()
    print(f"server of the log on {own}", flush=True)
    server.wait(lambda said: print(said, flush=True))
    return server


Opening: TypeAlias = Callable[[Options, contextlib.ExitStack], tuple[Store, Callable[[Options], None]]]


def _check_hub(options: Options) -> None:
    """Before anything is opened. Raises InvalidArgument."""
    if options.hub is None:
        return
    host_and_port(options.hub, "--hub")
    if options.cluster is not None:
        raise InvalidArgument("a node of a cluster follows its log already: give --hub to a server of its own")


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(
    options: Options,
    opened: Opening = open_store,
    each_second: Callable[[metrics.Stats], None] = lambda stats: None,
) -> int:
    """Serves until it is told to stop; 0 after a graceful stop. ``opened`` opens the store, ``each_second`` is told its
    figures."""
    do_without_pandas()
    logs.begin(options.log_format)
    # Threads hand the interpreter to each other many times per request; the default of 5 ms is what a read would
    # wait for busy bytecode to let go.
    sys.setswitchinterval(0.0005)
    _give_memory_back()
    secure, https, tokens = credentials(options), _https(options), Tokens.load(options.token_file)
    host_and_port(options.listen, "--listen")
    _check_metrics(options)
    _check_http(options)
    _check_otlp(options)
    _check_cluster(options)
    _check_hub(options)
    with contextlib.ExitStack() as stack:
        try:
            store, listens = opened(options, stack)
        except KeyboardInterrupt:
            print("stopped before it listened", flush=True)
            return 0
        asyncio.run(_serve(store, options, secure, https, tokens, listens, each_second))
    print("stopped", flush=True)
    return 0
