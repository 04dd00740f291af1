"""HTTP beside gRPC, for whoever speaks no gRPC: one ASGI application, under the same tokens, roles, limits and TLS.

::

    socket -- listener: connections, times -- front: ids, origins, tokens, errors -- a route -- the store's calls
                                                                     `-- shared: what several ask is computed once

============= ===========================================================================================
``listener``  uvicorn on the server's event loop: sockets, TLS, how long a client may take, the stop
``front``     what holds for every request: its id, where it comes from, what becomes of an error, what is counted
``bodies``    what clients send: limited, also after it is unpacked
``access``    who may do that: the token, and whether this listener takes writes
``shared``    equal questions at one snapshot are computed once; ETags
``rows``      /rows and /v1/tables/.../rows: parameters, and the rows that they ask for
``questions`` /v1/query and /v1/sql
``writes``    appends, and transactions in one request
``rendering`` answers as JSON, lines of JSON, CSV and Arrow
``routes``    which path is what; ``description``: the same for programs, OpenAPI
============= ===========================================================================================

**Invariants.**

1. *An HTTP request may do what the same call may do over gRPC, and no more.* ``access`` asks the same ``Tokens`` and
   ``Clients``. A listener beyond loopback without a token file takes no writes. No web page of another origin gets
   anything from a browser: ``front`` refuses its requests unless the operator has named the origin, and a server
   without tokens answers only to names of this machine, so that a foreign name that resolves to it reads nothing.
2. *A commit is answered with its timestamp when it is durable and visible*, and not before; one with an
   ``Idempotency-Key`` is a commit under that request token, so repeating it changes nothing (``writes``).
3. *A 304, and an answer that was computed for somebody else, are what reading again would give.* ``Store.last_change``
   names the newest snapshot at which a read of the table may differ; answers are kept under it, and under what was
   asked, and the watermark is looked at when the request comes (``shared``).
4. *No client holds memory that is not counted*: bodies, unpacked ones too, are read against a limit each and one of all
   together (``bodies``), answers have a limit, and who takes no byte is closed (``listener``).

Comes in: HTTP requests of strangers. Goes out: JSON, CSV, Arrow. May not touch: what the store's calls do. Begin
reading at ``routes``.
"""
