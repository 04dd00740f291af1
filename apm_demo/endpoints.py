"""What the web service offers: its customers, applications, servers and measured endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["ENDPOINTS", "PLACES", "Endpoint"]


class Endpoint(NamedTuple):
    """One measured endpoint; its id is what events and aggregates know it by."""

    endpoint_id: int
    customer: str
    application: str
    server: str
    method: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


PLACES: Final = (
    ("acme", "shop", "shop-1", (("GET", "/cart"), ("POST", "/checkout"))),
    ("acme", "shop", "shop-2", (("GET", "/cart"), ("POST", "/checkout"))),
    ("acme", "search", "search-1", (("GET", "/find"), ("GET", "/suggest"))),
    ("globex", "billing", "billing-1", (("GET", "/invoice"), ("GET", "/report"))),
)


def _endpoints() -> Iterator[Endpoint]:
    endpoint_id = 251
    for customer, application, server, routes in PLACES:
        for method, path in routes:
            yield Endpoint(endpoint_id, customer, application, server, method, path)
            endpoint_id += 1


ENDPOINTS: Final = tuple(_endpoints())
