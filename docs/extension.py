"""What pages need beyond Markdown: files of the repository, drawings, formulas; all of it when the site is built.

It is an extension of Python-Markdown and not a plug-in of a site generator, so that a page is the same in all of them.
"""

import re
from html import escape
from pathlib import Path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from math_core import LatexToMathML

ROOT = Path(__file__).parents[1]
TYPESET = LatexToMathML()


def formula(latex: str, display: bool) -> str:
    """The formula as MathML, which browsers set by themselves: no script, and no font but the site's own."""
    return TYPESET.convert_with_local_state(latex, displaystyle=display)


class Blocks(Preprocessor):
    """``{{ path }}`` becomes that file without its title, a drawing its lines, a block of ``math`` its formula."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines of a page, before anything else reads them."""
        text = re.sub(r"^\{\{ (.*) \}\}$", self.included, "\n".join(lines), flags=re.MULTILINE)
        text = re.sub(r"^!\[(.*)\]\(\S*assets/(\S+\.svg)\)$", self.drawn, text, flags=re.MULTILINE)
        return re.sub(r"^```math\n(.*?)^```$", self.typeset, text, flags=re.DOTALL | re.MULTILINE).split("\n")

    def included(self, match: re.Match[str]) -> str:
        """The file; its links into docs/ become links of the site."""
        return (ROOT / match[1]).read_text(encoding="utf-8").partition("\n")[2].replace("](../docs/", "](")

    def drawn(self, match: re.Match[str]) -> str:
        """The drawing within the page, not beside it, so that it has the page's ink, in the light and in the dark."""
        lines = (ROOT / "docs/assets" / match[2]).read_text(encoding="utf-8")
        named = lines.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{escape(match[1])}" ', 1)
        return self.md.htmlStash.store(f"<div>{named}</div>")

    def typeset(self, match: re.Match[str]) -> str:
        """A place that Markdown leaves alone, and fills with the formula at the end."""
        return self.md.htmlStash.store(f'<div class="formula">{formula(match[1], True)}</div>')


class Inline(InlineProcessor):
    """``$x$`` within a sentence."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """The formula, and the characters it takes the place of."""
        return self.md.htmlStash.store(formula(m[1], False)), m.start(0), m.end(0)


class Pages(Extension):
    """Both, for Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """After a page is cleaned (30), before its fenced code (25); after inline code (190), whose dollars stay."""
        md.preprocessors.register(Blocks(md), "blocks-of-headstart", 28)
        md.inlinePatterns.register(Inline(r"\$([^$\n]+)\$", md), "formulas", 185)


def makeExtension(**options: object) -> Pages:
    """What Python-Markdown asks a module for."""
    return Pages(**options)
