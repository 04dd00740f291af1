"""How the site is built: ``make docs`` (``python -m sphinx -W --keep-going -n docs build/docs``).

Pages are Markdown (MyST). What can be said by the code is generated from it: the reference from docstrings, commands,
options, settings and error pages from the objects themselves, by the directives at the end of this file. A link to a
file of the repository is an ordinary relative link, which works in the repository as well; one that leads nowhere is
an error of the build, as is every warning.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "100"  # of the commands' help
os.environ["NO_COLOR"] = "1"

import kivi  # noqa: E402

project = "kivi"
author = "the kivi developers"
version = release = kivi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["build"]
source_suffix = {".md": "markdown"}
root_doc = "index"

html_theme = "furo"
html_title = f"kivi {release}"
html_theme_options = {"navigation_with_keys": True}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Types are named alike in several rooms on purpose (Transaction of threads and of asyncio), and any of them will do.
suppress_warnings = ["ref.python"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = False
autodoc_default_options = {"show-inheritance": True}
default_role = "code"  # in docstrings `name` is code, and no promise that it has a page

nitpicky = True
# What signatures name that has no page here: types of other packages, type variables, and what the rooms below the
# public surface call their arguments.
nitpick_ignore_regex = [
    (r"py:.*", r"(np|numpy|pa|grpc|pyarrow|asyncio|concurrent|threading|collections|types|typing|datetime|os|abc)\..*"),
    (r"py:.*", r"(T|Tx|Snap|A|P|S|R|Any|Self|Generator|Iterator|AsyncIterator|Sequence|Mapping|Callable|Iterable)"),
    (
        r"py:.*",
        r"(DataFrame|SearchStrategy|SparkSession|StructType|pyspark\..*|Future|TracebackType|Generic|ABC|kivi\._.*)",
    ),
    (r"py:.*", r"kivi\.(api|model|arrow|client|aio|spark|store|embedded|wire)\..*"),
    (r"py:.*", r"(dt\..*|_asyncio\..*|OperatorCall|TimeSlot|Against|Group|Windows|Row|Kind|Dataset)"),
    (r"py:.*", r".*(Arguments|Outcome|Subscription|Appender|Transaction|Snapshot|Database|TableSchema|TailPoints).*"),
]

# Addresses beyond this machine are looked at by `python -m sphinx -b linkcheck docs build/links`, given a network.
linkcheck_anchors = False
linkcheck_timeout = 10

# -- pages of the repository's root ---------------------------------------------------------------------

DOCS = ROOT / "docs"
ROOT_PAGES = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "security": "SECURITY.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s]+)(?=\))")


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Links are as the repository wants them; here they lead to the site's pages, or to a copy of the file.

    The pages of the root stay where people look for them: their text takes the place of the page that has their name.
    """
    path = ROOT / ROOT_PAGES[name] if name in ROOT_PAGES else DOCS / f"{name}.md"
    pages = {ROOT / file: DOCS / f"{page}.md" for page, file in ROOT_PAGES.items()}
    app.env.note_dependency(str(path))

    def moved(link: re.Match[str]) -> str:
        target, mark, anchor = link[1].partition("#")
        file = (path.parent / target).resolve()
        file = pages.get(file, file)
        there = os.path.relpath(file, (DOCS / f"{name}.md").parent)
        scheme = "path:" if file.suffix == ".md" and not file.is_relative_to(DOCS) else ""
        return f"{scheme}{there}{mark}{anchor}"

    source[0] = LINK.sub(moved, path.read_text() if name in ROOT_PAGES else source[0])


# -- generated tables -----------------------------------------------------------------------------------


class Generated(Directive):
    """A directive whose content is Markdown that the code is asked for."""

    optional_arguments = 9

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = list(self.lines())
        made = nodes.container()
        self.state.nested_parse(StringList(lines, source=f"<{self.name}>"), self.content_offset, made, match_titles=1)
        return made.children


def parser() -> argparse.ArgumentParser:
    from kivi.cli.commands import parser

    return parser()


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def help_of(command: argparse.ArgumentParser) -> list[str]:
    return ["```text", *command.format_help().rstrip().splitlines(), "```", ""]


class Help(Generated):
    """``{kivi-help} scan``: what ``kivi scan --help`` prints; without a name, ``kivi --help``."""

    def lines(self) -> Iterator[str]:
        yield from help_of(commands()[self.arguments[0]] if self.arguments else parser())


class Options(Generated):
    """What ``kivi serve`` can be told, in its three spellings."""

    def lines(self) -> Iterator[str]:
        yield from ("| flag | environment | in the file | what it is |", "|---|---|---|---|")
        others = ("help", "set", "config", "print_settings")
        for action in commands()["serve"]._actions:
            if action.dest not in others:
                flag = " ".join(part for part in (action.option_strings[0], action.metavar) if part)
                yield f"| `{flag}` | `KIVI_{action.dest.upper()}` | `{action.dest}` | {action.help} |"
        yield ""


class StoreSettings(Generated):
    """The settings of a store, each with its default and its docstring."""

    def lines(self) -> Iterator[str]:
        from kivi.runtime.settings import Settings

        said = ModuleAnalyzer.for_module("kivi.runtime.settings").find_attr_docs()
        yield from ("| setting | default | what it is |", "|---|---|---|")
        for each in fields(Settings):
            text = " ".join(" ".join(said["Settings", each.name]).split()).replace("``", "`")
            yield f"| `{each.name}` | {readable(each.name, each.default)} | {text} |"
        yield ""


def readable(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value % 2**20 == 0:
        return f"{value // 2**20:,} MiB"
    if name.endswith("_s"):
        return f"{value:g} s" if value < 3600 else f"{value / 3600:g} h"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_page)
    app.add_directive("kivi-help", Help)
    app.add_directive("kivi-options", Options)
    app.add_directive("kivi-settings", StoreSettings)
    return {"parallel_read_safe": True}
