"""Matplotlib figures as SVG elements that take on the colours and fonts of the page around them.

Text and axes use `currentColor`, lines the CSS variables `--series-1` and so on (with a colour to fall
back on), so a figure is readable on light and dark pages. Fonts are the page's. Output is deterministic, and
all ids start with the figure's own `ident`, so that one page can have many figures.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that colour-blind readers can tell apart, dark enough for white paper; pages may override them.
SERIES = ("#0067a5", "#bf4a0b", "#007a5a", "#93428f", "#7d6200", "#a5243d")
DARK_SERIES = ("#62b5ee", "#ff9259", "#45cfa2", "#d99bd6", "#dfba4a", "#f58aa0")  # of a file on a dark page
MARGIN = 12  # pixels around the figure in a file
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True)
class Palette:
    """The colours of a figure."""

    ink: str
    series: tuple[str, ...]


# Placeholders that are replaced by the page's colours when the SVG is written.
PAGE = Palette("#010203", tuple(f"#04050{n}" for n in range(len(SERIES))))
CARD = "#04050f"  # the background of the page's cards, for a part that hides what lies beneath
# For files with a white background.
PAPER = Palette("#1c2730", SERIES)

_PAGE_COLOURS = {PAGE.ink: "currentColor", CARD: "var(--card, #ffffff)"} | {
    ink: f"var(--series-{n}, {colour})" for n, (ink, colour) in enumerate(zip(PAGE.series, SERIES, strict=True), 1)
}
_NAMESPACE = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


def blank(
    width: float, height: float, left: float, right: float, top: float, bottom: float, ink: str = PAGE.ink
) -> tuple[Figure, Axes]:
    """A transparent figure with one pair of axes without frame; sizes are in pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
    for part in (figure, axes):
        part.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, length=0, labelsize=11, pad=6)
    return figure, axes


def to_svg(figure: Figure, ident: str, label: str) -> str:
    """The figure as one <svg> element for a page; `label` is its text alternative."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": ident}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the page's fonts draw the text, not matplotlib's
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    _clean(root, ident)
    width, height = (72 * float(size) for size in figure.get_size_inches())
    root.attrib.clear()
    root.attrib |= {
        "viewBox": f"0 0 {width:g} {height:g}",
        "role": "img",
        "aria-label": label,
        "style": f"max-width: {width:g}px; stroke-linejoin: round",
    }
    ElementTree.register_namespace("", _NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def standalone(element: str) -> str:
    """The content of an SVG file from an element of `to_svg`: on a card of its own, light or dark as the reader's."""
    root = ElementTree.fromstring(element)
    _, _, *size = root.attrib["viewBox"].split()
    width, height = (float(side) + 2 * MARGIN for side in size)
    box = {"viewBox": f"{-MARGIN} {-MARGIN} {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    root.attrib |= box | {"style": "stroke-linejoin: round"}
    style = ElementTree.Element(f"{{{_NAMESPACE}}}style")
    style.text = _rule("#ffffff", PAPER.ink, "#d5dbe0", SERIES) + (
        f"@media (prefers-color-scheme: dark) {{ {_rule('#1b2026', '#e3e8ec', '#313a42', DARK_SERIES)}}}"
    )
    card = ElementTree.Element(
        f"{{{_NAMESPACE}}}rect",
        {"x": f"{0.5 - MARGIN}", "y": f"{0.5 - MARGIN}", "width": f"{width - 1:g}", "height": f"{height - 1:g}"}
        | {"rx": "10", "style": "fill: var(--card); stroke: var(--line)"},
    )
    root[:0] = [style, card]
    ElementTree.register_namespace("", _NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _rule(card: str, ink: str, line: str, series: tuple[str, ...]) -> str:
    """The CSS rule that sets the colours of a stand-alone file."""
    colours = " ".join(f"--series-{n}: {colour};" for n, colour in enumerate(series, 1))
    return f"svg {{ --card: {card}; --line: {line}; color: {ink}; {colours} font-family: {FONTS}; }} "


def _clean(root: ElementTree.Element, ident: str) -> None:
    """Remove metadata, styles that would affect the page, and unused ids."""
    links = {link for element in root.iter() for link in _links(element)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_NAMESPACE}}}metadata", f"{{{_NAMESPACE}}}style"):
                parent.remove(child)
        if parent.tag != f"{{{_NAMESPACE}}}text":
            parent.text = None
        parent.tail = None
    for element in root.iter():
        attributes = element.attrib
        name = attributes.pop("id", None)
        if name in links:
            attributes["id"] = f"{ident}-{name}"
        if _HREF in attributes:
            attributes["href"] = f"#{ident}-{attributes.pop(_HREF)[1:]}"
        for key in ("clip-path", "style", "fill", "stroke"):
            if key in attributes:
                attributes[key] = _restyle(attributes[key], ident)
    _drop_empty(root)


def _links(element: ElementTree.Element) -> list[str]:
    found = [match for value in element.attrib.values() for match in re.findall(r"url\(#([^)]+)\)", value)]
    return found + ([element.attrib[_HREF][1:]] if _HREF in element.attrib else [])


def _restyle(text: str, ident: str) -> str:
    """Replace colours, fonts and ids in a style by the page's."""
    text = re.sub(r"font-family: [^;]*;?\s*", "", text)
    text = re.sub(r"font: (?:(\w+) )?([\d.]+)px [^;]*", _font, text)
    for ink, colour in _PAGE_COLOURS.items():
        text = text.replace(ink, colour)
    return text.replace("url(#", f"url(#{ident}-")


def _font(match: re.Match[str]) -> str:
    return f"font-size: {match[2]}px" + ("; font-weight: 600" if match[1] in ("bold", "700") else "")


def _drop_empty(element: ElementTree.Element) -> None:
    for child in list(element):
        _drop_empty(child)
        if len(child) == 0 and child.tag in (f"{{{_NAMESPACE}}}g", f"{{{_NAMESPACE}}}defs"):
            element.remove(child)
