"""Pages that include a file of the repository, so that there is one copy of it."""

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Put the file in the place of ``{{ its path }}``, without its title; links into docs/ become links of the site."""
    root = Path(config.config_file_path).parent

    def included(match: re.Match[str]) -> str:
        text = (root / match[1]).read_text(encoding="utf-8")
        return text.partition("\n")[2].replace("](../docs/", "](")

    return re.sub(r"^\{\{ (.*) \}\}$", included, markdown, flags=re.MULTILINE)
