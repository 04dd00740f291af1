"""Makes src/api.ts from the server's own description of its routes (``/openapi.json``).

``python clients/typescript/generate.py`` writes it; a test says when it is not current.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kivi_server.http.description import described

import kivi

TARGET = Path(__file__).with_name("src") / "api.ts"
HEAD = "// Made by generate.py from the server's description of its routes: not to be edited.\n"
PARAMETERS = {"RowsQuery": "/v1/tables/{table}/rows", "LiveQuery": "/v1/live"}
BODIES = {"Query": "/v1/query", "Sql": "/v1/sql"}


def of_type(schema: dict[str, Any]) -> str:
    """A JSON schema as a type. What is not said may be anything that JSON has."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(f'"{each}"' for each in schema["enum"])
    match schema.get("type"):
        case list() as several:
            return " | ".join(of_type({**schema, "type": each}) for each in several)
        case "string":
            return "string"
        case "integer" | "number":
            return "number"
        case "boolean":
            return "boolean"
        case "array":
            inner = of_type(schema["items"]) if "items" in schema else "Value"
            return f"({inner})[]" if " " in inner else f"{inner}[]"
        case "object" if isinstance(also := schema.get("additionalProperties"), dict):
            return f"Record<string, {of_type(also)}>"
        case "object":
            return "Row"
    return "Value"


def interface(name: str, about: str, members: list[tuple[str, bool, str, str]]) -> str:
    lines = [f"/** {about} */", f"export interface {name} {{"]
    for member, required, type_, said in members:
        lines += [f"  /** {said} */"] if said else []
        lines.append(f"  {member}{'' if required else '?'}: {type_};")
    return "\n".join([*lines, "}", ""])


def of_object(name: str, about: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    return interface(
        name, about, [(each, each in needed, of_type(inner), "") for each, inner in schema["properties"].items()]
    )


def text() -> str:
    api = described(kivi.__version__)
    paths = api["paths"]
    parts = [
        HEAD,
        "/** A value of a row. Times are ISO 8601 in UTC, bytes 0x and hexadecimal; decimals, and whole numbers beyond",
        " * 2^53 - 1, are text. */",
        "export type Value = null | boolean | number | string | Value[] | { [name: string]: Value };",
        "export type Row = Record<string, Value>;\n",
    ]
    for name, path in PARAMETERS.items():
        said = paths[path]["get"]
        given = [each for each in said["parameters"] if each["in"] == "query" and each["name"] not in ("format", "of")]
        members = [
            (each["name"], each["name"] == "table", of_type(each["schema"]), each["description"]) for each in given
        ]  # `of` is left out, so there is a table
        parts.append(interface(name, f"The parameters of GET {path}: {said['summary'].lower()}.", members))
    for name, path in BODIES.items():
        said = paths[path]["post"]
        schema = said["requestBody"]["content"]["application/json"]["schema"]
        parts.append(of_object(name, f"The body of POST {path}: {said['summary'].lower()}.", schema))
    answer = paths["/v1/query"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    parts.append(of_object("Rows", "An answer, at the snapshot that it names. `more`: it was cut at a limit.", answer))
    parts.append(
        of_object("Failure", "What the server says of a request that failed.", api["components"]["schemas"]["Error"])
    )
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(text())
