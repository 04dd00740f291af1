"""The kivi server: transport only. Sessions, auth, limits, one error table, metrics; the rules are the store's.

============ ==========================================================================
``serve``    the process: listening, health, signals, the order of a graceful stop
``service``  one method per call of kivi.v1.Kivi: decode, ask the store, encode
``sessions`` the bidirectional stream: frames in, lanes, replies gathered into frames
``translate`` messages to the store's arguments and back; what a stranger sent is checked here
``auth``     access tokens: roles, tables, allowances
``clients``  what each client uses, and when that is too much
``logs``     what is logged, as text or JSON, with request ids
``limits``   the published limits
``status``   errors to gRPC status
``calls``    what was asked for, how it ended and how long it took
``metrics``  the store's stats, distributions and calls for Prometheus
``otlp``     OpenTelemetry in: spans become events, each once
``rows``     rows over HTTP as JSON and CSV, read only: Grafana's Infinity data source, a spreadsheet
============ ==========================================================================

Installed as ``kivi_server``, so that no generic name lands among a user's packages.
"""

from __future__ import annotations
