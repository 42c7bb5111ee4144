"""The page as a strict parser of HTML reads it."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

import html5lib


def parsed(text: str) -> Element:
    """The document without namespaces. Raises html5lib's `ParseError` for what a browser would have to guess."""
    document: Element = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)
    for element in document.iter():
        if isinstance(element.tag, str):
            element.tag = element.tag.rpartition("}")[2]
    return document


def words(element: Element | None) -> str:
    """Its text with single spaces."""
    return "" if element is None else " ".join("".join(element.itertext()).split())


def table(document: Element, section: str) -> list[list[str]]:
    """The cells of the table in the section with this heading, by its id."""
    (found,) = [each for each in document.iter("section") if each.get("aria-labelledby") == section]
    return [[words(cell) for cell in row if cell.tag in ("td", "th")] for row in found.iter("tr")][1:]


def active_parts(document: Element) -> Iterator[str]:
    """What could run or style without being a file of the server: nothing, if all is well."""
    for element in document.iter():
        if not isinstance(element.tag, str):
            continue
        if element.tag in ("style", "iframe", "object", "embed", "base"):
            yield element.tag
        if element.tag == "script" and (not str(element.get("src", "")).startswith("/static/") or element.text):
            yield "script"
        for name, value in element.attrib.items():
            if name == "style" or name.startswith("on") or value.strip().lower().startswith("javascript:"):
                yield f"{element.tag} {name}={value}"
