"""The kivi server: transport only. Sessions, auth, limits, one error table, metrics; the rules are the store's.

================= =====================================================================
``process``       the process: listening, health, signals, the order of a graceful stop
``service``       one method per call of kivi.v1.Kivi: decode, ask the store, encode
``session``       one stream: frames in, replies gathered into frames; ``requests``: a method each
``sessions``      all of them, and the pools that they share; ``waiting``: for snapshots to come
``scheduler``     whose turn it is on the event loop
``asked``         a frame's requests, each with its bodies
``commits``       commits of deltas and puts, read together
``reads``         rows by key, many at a time
``pages``         the pages of an open scan; ``row_groups``: what is in them
``subscriptions`` a client's subscriptions; ``live_queries``: their messages
``translate``     messages to the store's arguments and back; what a stranger sent is checked here
``auth``          access tokens: roles, tables, allowances
``clients``       what each client uses, and when that is too much
``options``       flags, the environment and one file
``logs``          what is logged, as text or JSON, with request ids
``limits``        the published limits
``status``        errors to gRPC status
``calls``         what was asked for, how it ended and how long it took
``metrics``       the store's stats, distributions and calls for Prometheus
``wsgi``          a port for one WSGI application: the metrics
``sql_tables``    what a question in SQL may read
``otlp``          OpenTelemetry in: spans become events, each once
``http``          HTTP beside gRPC: reads, writes, questions (the extra kivi[http])
================= =====================================================================

Comes in: messages of strangers. Goes out: answers of the store, as messages. May not touch: what lies under the store
(its log, engine and pending rows). Begin reading at ``service``, then ``session``.

Installed as ``kivi_server``, so that no generic name lands among a user's packages.
"""

from __future__ import annotations
