"""HTTP beside gRPC: rows for whoever speaks no gRPC. Translates to the same calls, under the same tokens and limits."""
