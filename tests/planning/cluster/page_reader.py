"""A page as a tree, so that tests can ask it what it shows; anything that is not well-formed fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["Node", "read_page"]

_VOID = {"meta", "br", "hr", "img", "input", "link"}
# In SVG a browser takes "/>" for an end; in HTML it does not.
_SHAPES = {"rect", "line", "path"}


@dataclass
class Node:
    """One element. `text` is everything written in it, with single spaces."""

    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    @property
    def text(self) -> str:
        return " ".join(" ".join(each if isinstance(each, str) else each.text for each in self.children).split())

    def walk(self) -> Iterator[Node]:
        yield self
        for each in self.children:
            if isinstance(each, Node):
                yield from each.walk()

    def all(self, tag: str, *classes: str) -> list[Node]:
        return [each for each in self.walk() if each.tag == tag and each.classes >= set(classes)]

    def one(self, tag: str, *classes: str) -> Node:
        (found,) = self.all(tag, *classes)
        return found

    def percent(self, name: str) -> float:
        value = self.attributes[name]
        assert value.endswith("%"), f"{self.tag} {name}={value}"
        return float(value[:-1])


def read_page(text: str) -> Node:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"not closed: {[each.tag for each in reader.open[1:]]}"
    return reader.open[0]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is there twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in _VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _SHAPES, f"<{tag}/> ends nothing in HTML"
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)
