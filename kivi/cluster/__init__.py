"""A node of a cluster: the same store as ever, over a log that NATS JetStream keeps and orders.

Comes in: a directory, the name of the cluster, the addresses of NATS servers. Goes out: a ``Store`` whose commits are
judged by every node alike (``kivi.mvcc.replicated``), and what the node says and hears of the others. May not touch:
what an answer means; there is no rule here that a single store does not have.

    node       opening a node, the thread that reads the log, what is said of nodes
    streams    the stream, and what all nodes have to agree on
    status     what is to be known of the cluster, and what to do about it
    founding   a cluster that begins with a store, or anew with a node
    peers      a nats-server of each node's own
"""

from kivi.cluster.node import ClusterNode
from kivi.cluster.peers import PeerServer, address_of, own_peer, peers_of, secret_of
from kivi.log.certificates import Certificates, trusting

__all__ = ["Certificates", "ClusterNode", "PeerServer", "address_of", "own_peer", "peers_of", "secret_of", "trusting"]
