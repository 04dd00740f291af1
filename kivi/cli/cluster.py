"""``kivi cluster``: how a cluster is, and how one begins with what there is."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from kivi.cli.text import print_rows, print_value
from kivi.errors import InvalidArgument, Unavailable

__all__ = ["begin", "forget", "shards", "status", "verify"]

_NODES = ("node", "state", "address", "version", "watermark", "behind", "behind s", "silent s", "agrees", "disk free")
_LOOK_S = 0.2
_FEATURES = ("feature", "state", "for")
_COPIES = ("server", "leads", "current", "away", "behind")


def status(db: Any, args: argparse.Namespace) -> int:
    """The nodes, the log, and what somebody has to do: 1 if there is something."""
    found = db.cluster_status()
    problems: list[str] = found["problems"]
    if args.output == "json":
        print_value(found, "json")
        return 1 if problems else 0
    print_rows([_node(one, found["node"]) for one in found["nodes"]], _NODES, args.output)
    if features := found["features"]:
        address = {one["node"]: one["address"] or one["node"] for one in found["nodes"]}
        print()
        print_rows([_feature(one, address) for one in features], _FEATURES, args.output)
    if (log := found["log"]) is not None:
        print()
        print_rows(log["copies"], _COPIES, args.output)
        full = log["nbytes"] / log["limit_bytes"]
        print(
            f"\nlog {log['stream']}: messages {log['first']} to {log['last']}, {log['nbytes'] / 1e6:,.1f} MB, "
            f"{full:.1%} full; {found['kept']}"
        )
    print(f"\n{found['cluster']}: " + ("all is well" if not problems else "somebody has to do something:"))
    for problem in problems:
        print(f"* {problem}")
    return 1 if problems else 0


def forget(db: Any, args: argparse.Namespace) -> int:
    """Goes on without a node that is gone for good."""
    db.forget_node(args.node)
    return 0


def shards(db: Any, args: argparse.Namespace) -> int:
    """Which nodes hold which shards: 1 if nobody holds some. Or moves them."""
    match args.words:
        case []:
            return _held(db, args)
        case ["move", named] if args.to:
            move = db.move_shards(named, args.to, source=args.source, copy=args.copy)
            print(f"move {move} of the shards {named} to {args.to}: kivi cluster shards says how far it is")
            while args.wait and any(one["id"] == move for one in db.cluster_status()["moves"]):
                time.sleep(_LOOK_S)
            return 0
        case ["rebalance"]:
            return _rebalance(db, args)
        case ["cancel", move]:
            db.cancel_move(move)
            return 0
        case _:
            raise InvalidArgument("kivi cluster shards [move SHARDS --to NODE | rebalance | cancel MOVE]")


def _rebalance(db: Any, args: argparse.Namespace) -> int:
    """Orders moves until the nodes hold equally many; with ``--wait`` all of them, else those that wait for none."""
    keep = None if args.keep is None else [name for name in args.keep.split(",") if name]
    while True:
        moves = db.rebalance_shards(copies=args.copies, away_from=args.away_from, keep=keep, dry_run=args.dry_run)
        print_rows(moves, ("move", "shards", "to", "source"), args.output)
        while args.wait and not args.dry_run and db.cluster_status()["moves"]:
            time.sleep(_LOOK_S)
        if args.dry_run or not args.wait or not moves:
            break
    if waiting := [one for one in moves if not one["move"] and not args.dry_run]:
        print(
            f"{len(waiting)} of these wait for others: ask again when kivi cluster shards lists no moves",
            file=sys.stderr,
        )
    return 0


def verify(db: Any, args: argparse.Namespace) -> int:
    """Whether nodes store the same: 1 if they do not, or if some did not say."""
    ts = db.verify_cluster()
    until = time.monotonic() + args.wait
    print(f"the nodes compare what they store at {ts}", file=sys.stderr)
    while True:
        status = db.cluster_status()
        found = [one for one in status["content"] if int(one["ts"]) >= ts]
        states = {one["state"] for one in found}
        is_over = bool(found) and "waiting" not in states
        if is_over or time.monotonic() > until:
            break
        time.sleep(_LOOK_S)
    address = {one["node"]: one["address"] or one["node"] for one in status["nodes"]}
    rows = [
        {
            "shards": one["shards"],
            "at": one["ts"],
            "state": one["state"],
            "nodes": ", ".join(address.get(node, node) for node in one["nodes"]),
        }
        for one in found
    ]
    if args.output == "json":
        print_value({"content": rows}, "json")
    else:
        print_rows(rows, ("shards", "at", "state", "nodes"), args.output)
    if not is_over:
        print("some nodes have not said what they store yet: kivi cluster status goes on to tell", file=sys.stderr)
    return 0 if is_over and not states & {"differ", "undecided"} else 1


def _held(db: Any, args: argparse.Namespace) -> int:
    from kivi.log.shards import parse_shards, refined, shown_shards

    found = db.cluster_status()
    live = [(one, parse_shards(one["shards"])) for one in found["nodes"] if one["state"] in ("live", "silent")]
    rows = []
    for cut in refined(held for _, held in live):
        holders = [one["address"] or one["node"] for one, held in live if not cut & ~held]
        rows.append({"shards": shown_shards(cut), "nodes": ", ".join(holders)})
    moves: list[dict[str, Any]] = found["moves"]
    if args.output == "json":
        print_value({"shards": rows, "moves": moves}, "json")
    else:
        print_rows(rows, ("shards", "nodes"), args.output)
        address = {one["node"]: one["address"] or one["node"] for one in found["nodes"]}
        for move in moves:
            source = address.get(move["source"], move["source"]) or "nobody"
            state = (
                f"there since {move['since']}, given up when nobody reads below" if move["since"] else "being copied"
            )
            print(
                f"move {move['id']}: shards {move['shards']} to {address.get(move['to'], move['to'])}, given up by "
                f"{source}: {move['problem'] or state}"
            )
    return 0 if all(row["nodes"] for row in rows) else 1


def _feature(one: dict[str, Any], address: dict[str, str]) -> dict[str, Any]:
    lacking = ", ".join(address.get(node, node) for node in one["lack"])
    state = "on" if one["is_on"] else f"off: upgrade {lacking}" if lacking else "off, on with its first use"
    return {"feature": one["name"], "state": state, "for": one["what"]}


def _node(one: dict[str, Any], answering: str) -> dict[str, Any]:
    is_known = bool(one["address"])
    return {
        **one,
        "node": one["node"] + (" (this)" if one["node"] == answering else ""),
        "behind": one["behind"] if is_known else None,
        "behind s": round(one["behind_s"], 1) if is_known else None,
        "silent s": round(one["silent_s"], 1),
        "disk free": f"{one['disk_free_bytes'] / 1e9:,.1f} GB" if one["disk_bytes"] else None,
    }


def begin(args: argparse.Namespace) -> int:
    """``adopt`` and ``reseed``: a cluster that begins with the store in a directory."""
    try:
        from kivi.cluster.founding import adopt
    except ImportError:
        raise InvalidArgument(
            "kivi cluster needs the package nats-py, which is not installed here: pip install 'kivi[cluster]'"
        ) from None
    replace = args.action == "reseed"
    if replace and not args.yes:
        if not sys.stdin.isatty():
            raise InvalidArgument("this ends the log that is there, and what only it has is lost: --yes says so")
        if input(f"End the log of {args.cluster}, and begin anew with {args.dir}? (yes/no) ") != "yes":
            raise Unavailable("nothing was changed")
    founded = adopt(
        os.path.abspath(args.dir),
        args.cluster,
        args.nats.split(",") if args.nats else (),
        replace=replace,
        timeout_s=args.timeout or 60.0,
    )
    print(f"{founded.cluster} begins with the store in {args.dir}, which ends with commit timestamp {founded.last}")
    if founded.lost:
        print(f"{founded.lost} messages of the log that was there are lost: this node had not applied them")
    elif founded.lost is not None:
        print("nothing of the log that was there is lost: this node had applied all of it")
    if replace and not args.nats:
        print("delete the folder nats-server in the directory of every node, if they are one another's --peers")
    print(f"next: copy {args.dir} to every other node's machine: one with an empty directory would begin with nothing")
    servers = f"--nats {args.nats}" if args.nats else "--peers ..."
    print(f"then: kivi serve --cluster {args.cluster} {servers} --data DIR, on each")
    return 0
