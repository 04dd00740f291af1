"""HTTP beside gRPC: rows for whoever speaks no gRPC. Translates to the same calls, under the same tokens and limits.

Comes in: GET requests. Goes out: JSON and CSV. May not touch: anything that writes. Begin reading at ``rows``.
"""
